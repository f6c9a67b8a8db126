"""A view of a data set: its rows with renamed columns, or a selection of them."""

from collections.abc import Mapping
from typing import Any

from distflow.dataset.dataset import Dataset
from distflow.util.arrays import Ints


class DatasetView:
    """`rename`: column → its name in the view. `indices`: the selected rows, ascending; None: all."""

    def __init__(self, dataset: Dataset, rename: Mapping[str, str], indices: Ints | None = None) -> None:
        self.dataset, self.rename, self.indices = dataset, rename, indices
        self.column_names = tuple(rename.get(n, n) for n in dataset.column_names)

    def __len__(self) -> int:
        return len(self.dataset) if self.indices is None else len(self.indices)

    def __getitem__(self, i: int, /) -> dict[str, Any]:
        return {self.rename.get(n, n): v for n, v in self.dataset[self._row(i)].items()}

    def location(self, i: int) -> str:
        """Returns the file and line of row `i`."""
        return self.dataset.location(self._row(i))

    def select(self, indices: Ints) -> "DatasetView":
        return DatasetView(self.dataset, self.rename, indices if self.indices is None else self.indices[indices])

    def _row(self, i: int) -> int:
        return i if self.indices is None else int(self.indices[i])
