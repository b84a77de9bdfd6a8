"""Fixtures of the option tests, which hooks into server arguments need too."""

from tests.options.conftest import make_model, model, server_args  # noqa: F401
