"""The loader: an endless stream of prompts in a computed order. Its only state is the step number."""

from collections.abc import Sequence
from concurrent.futures import Future
from threading import Thread
from typing import Any, Protocol

import numpy as np

from distflow.dataset.curriculum import Curriculum
from distflow.dataset.shuffle import permute
from distflow.plan.layout import contiguous_share
from distflow.util.arrays import Ints

_Loaded = tuple[Ints, dict[str, list[Any]]]


class RowSource(Protocol):
    """Random access to rows, as `Dataset` and `DatasetView` provide it."""

    column_names: tuple[str, ...]

    def __len__(self) -> int: ...
    def __getitem__(self, i: int, /) -> dict[str, Any]: ...


class Loader:
    """Loads `prompts` per step, each `repeat` times. The stream crosses epoch boundaries: every row once per epoch.

    The position p of a prompt in the stream is also its group id; the samples of group p are p * repeat + j. With
    `rewind`, every step has the first prompts; without `shuffle`, every epoch has the rows in their order. A
    `curriculum` draws the rows instead, whose state is more than a number.
    """

    def __init__(
        self,
        dataset: RowSource,
        prompts: int,
        repeat: int,
        seed: int,
        rewind: bool = False,
        shuffle: bool = True,
        curriculum: Curriculum | None = None,
    ) -> None:
        self.dataset, self.prompts, self.repeat, self.seed = dataset, prompts, repeat, seed
        self.rewind, self.shuffle, self.curriculum = rewind, shuffle, curriculum
        # First position in the stream, and rows of its epochs: rows that were appended join with an epoch.
        self.eras: list[tuple[int, int]] = [(0, len(dataset))]
        self._prefetched: tuple[tuple[int, int, int], Future[_Loaded]] | None = None

    def resume(self, eras: Sequence[Sequence[int]], position: int) -> None:
        """Continues a stream with these `eras`; rows that it did not have join with the first epoch after `position`.

        Prompts before that position were drawn, or are drawn now as they would have been.
        """
        self.eras = [(int(start), int(rows)) for start, rows in eras if start <= position]
        start, rows = self.eras[-1]
        if rows != len(self.dataset):
            self.eras.append((start + -(-(position - start) // rows) * rows, len(self.dataset)))

    def position(self, step: int) -> int:
        """Returns the position of a step's first prompt."""
        return 0 if self.rewind else step * self.prompts

    def load(self, step: int, replica: int, replicas: int) -> _Loaded:
        """Returns the sample ids, ascending, and one list per field, of one of `replicas` shares of a step.

        Shares are contiguous and differ by at most one prompt; with fewer prompts than replicas, some are empty. The
        samples of one prompt share its values: do not change them in place.
        """
        if self._prefetched and self._prefetched[0] == (step, replica, replicas):
            (_, future), self._prefetched = self._prefetched, None
            return future.result()
        return self._load(step, replica, replicas)

    def prefetch(self, step: int, replica: int, replicas: int) -> None:
        """Starts to load in the background; `load` with the same arguments returns the result, or raises the error.

        Only the last prefetch is kept.
        """
        key = (step, replica, replicas)
        if self._prefetched and self._prefetched[0] == key:
            return
        future: Future[_Loaded] = Future()

        def fill() -> None:
            try:
                future.set_result(self._load(*key))
            except BaseException as e:
                future.set_exception(e)

        self._prefetched = key, future
        Thread(target=fill, name=f"prefetch step {step}", daemon=True).start()  # daemon: does not delay the exit

    def _load(self, step: int, replica: int, replicas: int) -> _Loaded:
        return self.load_range(self.position(step), self.prompts, replica, replicas)

    def load_range(self, position: int, prompts: int, replica: int, replicas: int) -> _Loaded:
        """Returns the share of `replica` of any range of the stream."""
        if not 0 <= replica < replicas:
            raise IndexError(f"replica {replica} of {replicas}")
        first, last = (position + p for p in contiguous_share(prompts, replicas, replica))
        rows = [self.dataset[i] for i in self._order(first, last - first)]
        ids = np.arange(first * self.repeat, last * self.repeat, dtype=np.int64)
        names = self.dataset.column_names
        return ids, {name: [row[name] for row in rows for _ in range(self.repeat)] for name in names}

    def _order(self, first: int, count: int) -> list[int]:
        """Returns the rows at `count` positions of the stream."""
        if self.curriculum:
            return self.curriculum.rows_at(first, count)
        epoch, index, rows = self._rows(np.arange(first, first + count, dtype=np.int64))
        if not self.shuffle:
            return [int(i) for i in index]
        order: list[int] = []
        for e in np.unique(epoch).tolist():
            order += permute(index[epoch == e], int(rows[epoch == e][0]), self.seed, e).tolist()
        return order

    def _rows(self, positions: Ints) -> tuple[Ints, Ints, Ints]:
        """Returns for positions of the stream the epoch, the index in it, and how many rows that epoch has."""
        starts, rows = np.array(self.eras, np.int64).T
        epochs = np.concatenate(([0], np.cumsum(np.diff(starts) // rows[:-1])))
        era = np.searchsorted(starts, positions, side="right") - 1
        epoch, index = np.divmod(positions - starts[era], rows[era])
        return epochs[era] + epoch, index, rows[era]
