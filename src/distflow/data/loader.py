"""The loader: an endless stream of prompts, in an order that is computed, not kept. Its state is the step number."""

from concurrent.futures import Future
from threading import Thread
from typing import Any, Protocol

import numpy as np

from distflow.data.balance import Ints
from distflow.data.shuffle import permute
from distflow.errors import DataError

_Loaded = tuple[Ints, dict[str, list[Any]]]


class Source(Protocol):
    """Rows by number, as `Rows` gives them."""

    names: tuple[str, ...]

    def __len__(self) -> int: ...
    def __getitem__(self, i: int, /) -> dict[str, Any]: ...


class Loader:
    """`prompts` per step, each `repeat` times. The stream runs over epoch boundaries: every row once per epoch.

    Position p of the stream is also the group id of its prompt; the samples of group p are p * repeat + j.
    """

    def __init__(self, rows: Source, prompts: int, repeat: int, seed: int) -> None:
        self.rows, self.prompts, self.repeat, self.seed = rows, prompts, repeat, seed
        self._ahead: tuple[tuple[int, int, int], Future[_Loaded]] | None = None

    def epoch_of(self, step: int) -> int:
        """The epoch in which a step begins; it may end in a later one."""
        return step * self.prompts // len(self.rows)

    def load(self, step: int, cell: int, cells: int) -> _Loaded:
        """Sample ids, ascending, and one list per field: the share of `cell` when `cells` divide the step evenly.

        The samples of one prompt share its values: do not change them in place.
        """
        if self._ahead and self._ahead[0] == (step, cell, cells):
            (_, future), self._ahead = self._ahead, None
            return future.result()
        return self._load(step, cell, cells)

    def prefetch(self, step: int, cell: int, cells: int) -> None:
        """Begin to load in the background; `load` with the same arguments takes the result, or raises the error.

        One is kept: the next prefetch forgets one that was not taken.
        """
        key = (step, cell, cells)
        if self._ahead and self._ahead[0] == key:
            return
        future: Future[_Loaded] = Future()

        def fill() -> None:
            try:
                future.set_result(self._load(*key))
            except BaseException as e:
                future.set_exception(e)

        self._ahead = key, future
        Thread(target=fill, name=f"prefetch step {step}", daemon=True).start()  # daemon: never holds up the exit

    def _load(self, step: int, cell: int, cells: int) -> _Loaded:
        return self.draw(step * self.prompts, self.prompts, cell, cells)

    def draw(self, position: int, prompts: int, cell: int, cells: int) -> _Loaded:
        """The share of `cell` of any stretch of the stream."""
        share, rest = divmod(prompts, cells)
        if rest:
            fits = " or ".join(str(k * cells) for k in (share, share + 1) if k)
            raise DataError(f"{prompts} prompts per step do not divide by {cells} workers; make it {fits}")
        if not 0 <= cell < cells:
            raise IndexError(f"cell {cell} of {cells}")
        first = position + cell * share
        rows = [self.rows[i] for i in self._order(first, share)]
        ids = np.arange(first * self.repeat, (first + share) * self.repeat, dtype=np.int64)
        return ids, {name: [row[name] for row in rows for _ in range(self.repeat)] for name in self.rows.names}

    def _order(self, first: int, count: int) -> list[int]:
        """The rows at `count` positions of the stream."""
        epoch, index = np.divmod(np.arange(first, first + count, dtype=np.int64), len(self.rows))
        order: list[int] = []
        for e in np.unique(epoch).tolist():
            order += permute(index[epoch == e], len(self.rows), self.seed, e).tolist()
        return order
