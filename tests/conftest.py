"""What holds for all tests."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from distflow import cpu

settings.register_profile("any machine", deadline=None)  # no test depends on how fast the machine is
settings.load_profile("any machine")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Runs a test in one of torch's threads, which is where there are kernels."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=["kernels", "torch"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, one_thread: None) -> str:
    """Runs a test with kernels and without them."""
    if request.param == "torch":
        monkeypatch.setattr(cpu, "_kernels", lambda: None)
    return str(request.param)
