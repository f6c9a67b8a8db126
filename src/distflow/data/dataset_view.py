"""Rows under other names, or some of them only."""

from collections.abc import Mapping
from typing import Any

from distflow.data.balance import Ints
from distflow.data.dataset import Dataset


class DatasetView:
    """`rename`: column → its name here. `kept`: the rows that are left, ascending; None: all."""

    def __init__(self, rows: Dataset, rename: Mapping[str, str], kept: Ints | None = None) -> None:
        self.rows, self.rename, self.kept = rows, rename, kept
        self.names = tuple(rename.get(n, n) for n in rows.names)

    def __len__(self) -> int:
        return len(self.rows) if self.kept is None else len(self.kept)

    def __getitem__(self, i: int, /) -> dict[str, Any]:
        return {self.rename.get(n, n): v for n, v in self.rows[self._row(i)].items()}

    def describe(self, i: int) -> str:
        """Where row `i` is."""
        return self.rows.describe(self._row(i))

    def keep(self, kept: Ints) -> "DatasetView":
        return DatasetView(self.rows, self.rename, kept if self.kept is None else self.kept[kept])

    def _row(self, i: int) -> int:
        return i if self.kept is None else int(self.kept[i])
