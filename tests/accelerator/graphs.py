"""A stand-in for CUDA's graphs on the rehearsal's device: it records operations, and does them again.

As on a GPU, what is recorded has no value before it is replayed, and a replay reads and writes the memory of the
recording: it knows no tensor that has taken the place of another one since.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class _Done:
    operation: Callable[[], Any]
    results: list[Tensor]  # in new memory


class Graph:
    """What torch.cuda.CUDAGraph is."""

    recording: "Graph | None" = None
    replays = 0

    def __init__(self) -> None:
        self.done: list[_Done] = []

    def replay(self) -> None:
        assert Graph.recording is None
        Graph.replays += 1
        for done in self.done:
            for old, new in zip(done.results, _tensors(done.operation()), strict=False):
                old.copy_(new)


def record(operation: Callable[[], Any], fresh: bool) -> Any:
    """Does an operation of the device, and notes it in the graph that is recorded. `fresh`: its results have memory of
    their own."""
    graph, result = Graph.recording, operation()
    if graph:
        graph.done.append(_Done(operation, _tensors(result) if fresh else []))
    return result


@contextmanager
def recorded(graph: Graph, capture_error_mode: str = "global") -> Iterator[None]:
    """What torch.cuda.graph is."""
    assert capture_error_mode == "thread_local", "threads that ask whether NCCL is done end any other recording"
    Graph.recording = graph
    try:
        yield
    finally:
        Graph.recording = None
    for tensor in (t for done in graph.done for t in done.results if t.is_floating_point()):
        tensor.fill_(torch.nan)


def _tensors(value: Any) -> list[Tensor]:
    return [t for t in tree_leaves(value) if isinstance(t, Tensor)]
