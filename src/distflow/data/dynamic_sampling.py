"""Which prompts make up a step when some are not worth it: more are drawn until there are enough.

Every worker holds the same `Draw` and tells it the same, so they agree without asking anybody. Prompts are named by
their position in the loader's stream, and what is chosen depends only on which of them are worth keeping: the first
ones that are, in the order of the stream. How many were drawn at a time does not matter.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from distflow.data.balance import Ints


@dataclass(frozen=True)
class SampledPrompts:
    """The prompts of a step, and where the next one begins: what was drawn beyond it is drawn again."""

    positions: Ints  # ascending
    rounds: int
    next: int
    discarded: int  # prompts passed over for good
    filled: int  # prompts taken although they are not worth it, because the bound was reached


class DynamicSampling:
    """`wanted` prompts from position `first` on, of at most `wanted` × `rounds`, drawn in multiples of `unit`."""

    def __init__(self, first: int, wanted: int, rounds: int, unit: int) -> None:
        self.first, self.wanted, self.most, self.unit = first, wanted, wanted * rounds, unit
        self.keep: NDArray[np.bool_] = np.zeros(0, bool)  # of each prompt drawn so far
        self.rounds = 0
        self.count = wanted  # prompts of the round that is drawn now

    @property
    def position(self) -> int:
        """Where the present round begins."""
        return self.first + len(self.keep)

    def add(self, keep: NDArray[np.bool_]) -> bool:
        """What the present round has brought; True if that is enough, or all there may be."""
        self.keep = np.concatenate([self.keep, keep])
        self.rounds += 1
        found, drawn = int(self.keep.sum()), len(self.keep)
        if found >= self.wanted or drawn >= self.most:
            return True
        # As many as are likely to do, but never more than a step holds, nor than the bound allows.
        likely = -(-(self.wanted - found) * drawn // max(found, 1))
        self.count = min(-(-likely // self.unit) * self.unit, self.wanted, self.most - drawn)
        return False

    def useful(self) -> Ints:
        """Positions drawn so far that may yet be part of the step."""
        good, others = np.flatnonzero(self.keep), np.flatnonzero(~self.keep)
        return self.first + np.sort(np.concatenate([good[: self.wanted], others[: max(0, self.wanted - len(good))]]))

    def result(self) -> SampledPrompts:
        positions = self.useful()
        filled = max(0, self.wanted - int(self.keep.sum()))
        end = self.position if filled else int(positions[-1]) + 1
        return SampledPrompts(positions, self.rounds, end, end - self.first - self.wanted, filled)
