"""Which environment a prompt gets, and the seed of its randomness: both are functions of the run's seed alone."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from distflow.errors import DataError, shown, suggest
from distflow.util.arrays import Ints
from distflow.util.seeds import mix


def choose_environments(
    names: Sequence[str], ratios: Sequence[float], groups: Ints, seed: int, named: Sequence[Any] | None = None
) -> list[int]:
    """Returns the index of each sample's environment: named by its row, else drawn by the ratios.

    The samples of a prompt, which have the same group, get the same one.
    """
    if named is not None:
        for name in named:
            if name not in names:
                hint = suggest(name, names) if isinstance(name, str) else ""
                raise DataError(f"a row has the environment {shown(name)}, and there is none of that name{hint}")
        return [names.index(name) for name in named]
    bounds = np.cumsum(ratios) / np.sum(ratios)
    uniform = _words(seed, groups, 1).astype(np.float64) / 2.0**64
    return np.minimum(np.searchsorted(bounds, uniform, side="right"), len(names) - 1).tolist()  # type: ignore[no-any-return]


def group_seed(seed: int, group: int) -> int:
    """Returns the seed that all conversations about a prompt share: their environments draw the same numbers."""
    return int(_words(seed, np.array([group], np.int64), 2)[0] >> np.uint64(1))


def _words(seed: int, groups: Ints, stream: int) -> np.typing.NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        return mix(mix(np.array([(seed + stream) & (2**64 - 1)], np.uint64)) + groups.astype(np.uint64))
