"""Fixtures of the option tests, shared with the tests of hooks into server arguments."""

from tests.options.conftest import make_model, model, server_args  # noqa: F401
