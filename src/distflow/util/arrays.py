"""The array type of counts, places and lengths."""

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def position_in_run(values: Ints) -> Ints:
    """Returns the index of each element within its run of equal values: [7 7 9 9 9] → [0 1 0 1 2]."""
    index = np.arange(len(values), dtype=np.int64)
    starts = np.flatnonzero(np.diff(values, prepend=values[:1] - 1))
    return index - np.repeat(starts, np.diff(starts, append=len(values)))
