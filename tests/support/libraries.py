"""Detection of the prefill libraries on this machine."""

import pytest
import torch


def skip_without(library: str) -> None:
    """Skip the test where `library` ("fa3", "flashinfer"; "none" is always there) cannot run."""
    from kvc_kernels.extend.dense_prefill import LIBRARIES

    if library != "none" and not LIBRARIES[library].available(torch.device("cuda")):
        pytest.skip(f"needs {library}")
