"""Several batches at once on a CPU, each in a thread of its own.

The operations of a decoding step are too small to share between threads: this way no thread idles, and one batch
computes while another reads memory. Every batch reads all weights, so it has to have a number of sequences to be worth
it: fewer with kernels.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import pairwise
from typing import Any, Protocol, Self

import torch
from transformers import PreTrainedModel

from distflow.cpu.llama_forward import CpuLlamaForward
from distflow.model.llama_family import is_reentrant

_MIN_SEQUENCES, _MIN_WITH_KERNELS = 64, 8


class SequenceBatch(Protocol):
    """A continuous batch, as far as a thread needs to know it."""

    @property
    def has_unfinished(self) -> bool: ...

    @property
    def unfinished(self) -> list[Any]: ...

    def add(self, sequences: list[Any]) -> None: ...

    def step(self, wake: Callable[[], bool]) -> list[Any]: ...


def share_threads(model: PreTrainedModel, most: int, sequences: int) -> tuple[int, int]:
    """Returns the number of batches for this many sequences, at most `most`, and of torch's threads of each."""
    threads = torch.get_num_threads()
    if most == 1 or not is_reentrant(model):
        return 1, threads
    least = _MIN_WITH_KERNELS if CpuLlamaForward.for_model(model) else _MIN_SEQUENCES
    batches = max(1, min(most, sequences // least))
    return batches, max(1, threads // batches)


class ThreadedBatches:
    """Several batches as one. Which sequence runs in which batch does not depend on timing if all come at once."""

    def __init__(self, batches: Sequence[SequenceBatch], threads: int) -> None:
        """`threads`: torch's, of each batch."""
        self.batches = batches
        self._threads = ThreadPoolExecutor(len(batches), "batch", torch.set_num_threads, (threads,))
        self._histories: list[Any] = []  # that are open
        self._stepping: dict[Future[list[Any]], SequenceBatch] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(cancel_futures=True)
        torch.set_num_threads(torch.get_num_threads())  # new threads begin with the number that was set last

    @property
    def has_unfinished(self) -> bool:
        return bool(self._stepping) or any(b.has_unfinished for b in self.batches)

    def add(self, sequences: list[Any]) -> None:
        """Splits sequences evenly and in order, those with the same prompt together; batches with less to do get the
        larger parts. A sequence that continues a history runs in the batch that has it."""
        first_seen: dict[Any, int] = {}
        ordered = sorted(sequences, key=lambda s: first_seen.setdefault(s.request.shared, len(first_seen)))
        self._place([s.history for s in ordered if s.history])
        parts = [[s for s in ordered if s.history and s.history.batch == i] for i in range(len(self.batches))]
        free = [s for s in ordered if not s.history]
        size, more = divmod(len(free), len(parts))
        bounds = [i * size + min(i, more) for i in range(len(parts) + 1)]
        idle = sorted(range(len(parts)), key=lambda i: len(self.batches[i].unfinished) + len(parts[i]))
        for i, (start, end) in zip(idle, pairwise(bounds), strict=True):
            parts[i] += free[start:end]
        for batch, part in zip(self.batches, parts, strict=True):
            if part:
                batch.add(part)

    def _place(self, histories: list[Any]) -> None:
        """Assigns new histories to batches, so that none has more than its share of all that are open."""
        new = [h for h in dict.fromkeys(histories) if h.batch < 0]
        self._histories = [h for h in self._histories if not h.closed]
        most = -(-(len(self._histories) + len(new)) // len(self.batches))
        count = Counter(h.batch for h in self._histories)
        for history in new:
            history.batch = next(i for i in range(len(self.batches)) if count[i] < most)
            count[history.batch] += 1
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
