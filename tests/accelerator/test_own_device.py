"""Each worker gets an accelerator of its own, or the CPU where there is none."""

import pytest
import torch

from distflow.cluster.world import own_device
from distflow.errors import DistflowError


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A host with four CUDA devices, and a worker of local rank 3 that a launcher started on it."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda device: None)
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    return monkeypatch


def test_it_is_the_one_with_the_local_rank(host: pytest.MonkeyPatch) -> None:
    assert own_device() == torch.device("cuda", 3)


def test_it_is_the_cpu_where_there_is_none(host: pytest.MonkeyPatch) -> None:
    host.setattr(torch.accelerator, "is_available", lambda: False)
    assert own_device() == torch.device("cpu")


def test_it_is_the_cpu_where_there_is_only_one_without_float64(host: pytest.MonkeyPatch) -> None:
    host.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))
    assert own_device() == torch.device("cpu")


def test_it_is_the_only_one_that_a_scheduler_shows_to_the_worker(host: pytest.MonkeyPatch) -> None:
    host.setattr(torch.accelerator, "device_count", lambda: 1)
    host.delenv("LOCAL_WORLD_SIZE")
    assert own_device() == torch.device("cuda", 0)


@pytest.mark.parametrize("devices", [1, 3])
def test_more_workers_than_devices_are_an_error(host: pytest.MonkeyPatch, devices: int) -> None:
    host.setattr(torch.accelerator, "device_count", lambda: devices)
    with pytest.raises(DistflowError, match=f"local rank 3 has no cuda device of its own: this host shows {devices}"):
        own_device()
