"""What is chosen for a process is set in torch."""

from collections.abc import Iterator

import pytest
import torch

from distflow.device.offer import release_cached
from distflow.device.process import ProcessSettings


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    told: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", told.append, raising=False)
    before = torch.get_float32_matmul_precision()
    yield told
    torch.set_float32_matmul_precision(before)


def test_it_is_set_where_it_was_chosen(told: list[str]) -> None:
    torch.set_float32_matmul_precision("highest")
    ProcessSettings().apply()
    assert (told, torch.get_float32_matmul_precision()) == ([], "highest")
    ProcessSettings(expandable_segments=True, tf32=True).apply()
    assert (told, torch.get_float32_matmul_precision()) == (["expandable_segments:True"], "high")


def test_memory_that_torch_keeps_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    emptied: list[str] = []

    class Module:
        @staticmethod
        def empty_cache() -> None:
            emptied.append("once")

    monkeypatch.setattr(torch, "get_device_module", lambda device: Module)
    release_cached(torch.device("cpu"))
    assert not emptied
    release_cached(torch.device("cuda"))
    assert emptied == ["once"]
