"""Lanes: on a CPU with several threads, a continuous batch per thread.

The operations of a decoding step are too small to share: with lanes no thread idles, and one lane computes while
another reads memory. Every lane reads all weights, so a lane has to have a number of sequences to be worth it: fewer
with kernels, which work in one thread only. Where there are still fewer, one thread with kernels is faster than a few
without.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Protocol, Self, TypeVar

import torch
from transformers import PreTrainedModel

from distflow.cpu.llama_forward import CpuLlamaForward
from distflow.model.llama_family import is_reentrant

_MIN_SEQUENCES, _MIN_WITH_KERNELS = 64, 8
_THREADS = 4  # without kernels, that may be faster than one with them

S = TypeVar("S")


class Batch(Protocol[S]):
    @property
    def has_unfinished(self) -> bool: ...

    @property
    def unfinished(self) -> list[S]: ...

    def add(self, sequences: list[S]) -> None: ...

    def step(self, wake: Callable[[], bool]) -> list[S]: ...


def share_threads(model: PreTrainedModel, most: int, sequences: int) -> tuple[int, int]:
    """Returns the number of lanes for this many sequences, at most `most`, and of torch's threads of each."""
    threads = torch.get_num_threads()
    if most == 1 or not is_reentrant(model):
        return 1, threads
    lanes = max(1, min(most, sequences // _MIN_WITH_KERNELS))
    if threads < _THREADS * lanes and _has_kernels(model):
        return lanes, 1
    lanes = max(1, min(most, sequences // _MIN_SEQUENCES))
    return lanes, max(1, threads // lanes)


def _has_kernels(model: PreTrainedModel) -> bool:
    with torch_threads(1):
        return CpuLlamaForward.for_model(model) is not None


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Sets the number of torch's threads of the calling thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Lanes:
    """Several batches as one. Which sequence runs in which lane does not depend on timing if all come at once."""

    def __init__(self, batches: Sequence[Batch[Any]], threads: int) -> None:
        """`threads`: torch's, of each lane."""
        self.batches = batches
        self._threads = ThreadPoolExecutor(len(batches), "lane", torch.set_num_threads, (threads,))
        self._histories: list[Any] = []  # that are open
        self._stepping: dict[Future[list[Any]], Batch[Any]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(cancel_futures=True)
        torch.set_num_threads(torch.get_num_threads())  # new threads begin with the number that was set last

    @property
    def has_unfinished(self) -> bool:
        return bool(self._stepping) or any(b.has_unfinished for b in self.batches)

    def add(self, sequences: list[Any]) -> None:
        """Deals sequences out in contiguous shares, those of a prompt to one lane but for a few, the larger shares to
        lanes that have less to do. One that goes on in a history runs where that is."""
        first_seen: dict[Any, int] = {}
        ordered = sorted(sequences, key=lambda s: first_seen.setdefault(s.request.prompt, len(first_seen)))
        self._settle([s.history for s in ordered if s.history])
        shares = [[s for s in ordered if s.history and s.history.lane == lane] for lane in range(len(self.batches))]
        free = [s for s in ordered if not s.history]
        count, lanes = len(free), len(self.batches)
        bounds = [lane * (count // lanes) + min(lane, count % lanes) for lane in range(lanes + 1)]
        idle = sorted(range(lanes), key=lambda lane: len(self.batches[lane].unfinished) + len(shares[lane]))
        for lane, (start, end) in zip(idle, pairwise(bounds), strict=True):
            shares[lane] += free[start:end]
        for batch, share in zip(self.batches, shares, strict=True):
            if share:
                batch.add(share)

    def _settle(self, histories: list[Any]) -> None:
        """Gives new histories a lane, so that no lane has more than its share of all that are open."""
        new = [h for h in dict.fromkeys(histories) if h.lane < 0]
        self._histories = [h for h in self._histories if not h.closed]
        most = -(-(len(self._histories) + len(new)) // len(self.batches))
        count = Counter(h.lane for h in self._histories)
        for history in new:
            history.lane = next(lane for lane in range(len(self.batches)) if count[lane] < most)
            count[history.lane] += 1
        self._histories += new

    def step(self, wake: Callable[[], bool] = lambda: False) -> list[Any]:
        busy = set(map(id, self._stepping.values()))
        for batch in self.batches:
            if id(batch) not in busy and batch.has_unfinished:
                self._stepping[self._threads.submit(batch.step, wake)] = batch
        done, _ = wait(self._stepping, return_when=FIRST_COMPLETED)
        finished = []
        for future in done:
            del self._stepping[future]
            finished += future.result()
        return finished
