"""A view of a data set: its rows with renamed columns, or a selection of them."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from distflow.dataset.dataset import Dataset
from distflow.dataset.image_rows import names_with_images, with_images
from distflow.util.arrays import Ints


class DatasetView:
    """`rename`: column → its name in the view. `indices`: the selected rows, ascending; None: all.

    `images`: a name for the set if its rows have images, which the view then refers to.
    """

    def __init__(
        self, dataset: Dataset, rename: Mapping[str, str], indices: Ints | None = None, images: str | None = None
    ) -> None:
        self.dataset, self.rename, self.indices, self.images = dataset, rename, indices, images
        names = tuple(rename.get(n, n) for n in dataset.column_names)
        self.column_names = names_with_images(names) if images else names

    def __len__(self) -> int:
        return len(self.dataset) if self.indices is None else len(self.indices)

    def __getitem__(self, i: int, /) -> dict[str, Any]:
        number = self._row(i)
        row = self.whole_row(number)
        return with_images(row, self.images, number, self.dataset.folder(number)) if self.images else row

    def whole_row(self, number: int) -> dict[str, Any]:
        """Returns a row by its number in the data set, with the images that it holds."""
        return {self.rename.get(n, n): v for n, v in self.dataset[number].items()}

    @property
    def numbers(self) -> Ints:
        """Returns the numbers of its rows in the data set."""
        return np.arange(len(self.dataset)) if self.indices is None else self.indices

    def location(self, i: int) -> str:
        """Returns the file and line of row `i`."""
        return self.dataset.location(self._row(i))

    def select(self, indices: Ints) -> "DatasetView":
        chosen = indices if self.indices is None else self.indices[indices]
        return DatasetView(self.dataset, self.rename, chosen, self.images)

    def _row(self, i: int) -> int:
        return i if self.indices is None else int(self.indices[i])
