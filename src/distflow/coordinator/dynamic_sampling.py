"""Dynamic sampling: prompts whose samples are not useful are replaced by further ones until the step is full.

Every worker holds the same state and adds the same rounds to it, so all agree without communication. Prompts are
identified by their position in the loader's stream. A step consists of the first useful prompts of the stream, however
many were sampled per round.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from distflow.util.arrays import Ints


@dataclass(frozen=True)
class SampledPrompts:
    """The prompts of a step. The next step starts at `next_position`; prompts sampled beyond it are sampled again."""

    positions: Ints  # ascending
    rounds: int
    next_position: int
    discarded: int  # prompts that were passed over
    filled: int  # prompts that are used although not useful, as the limit was reached


class DynamicSampling:
    """Selects `target` prompts from `first` on, of at most `target` × `oversampling`.

    A round samples a multiple of `multiple`, which gives all workers equally many, but never more than `target`.
    """

    def __init__(self, first: int, target: int, oversampling: int, multiple: int) -> None:
        self.first, self.target, self.limit, self.multiple = first, target, target * oversampling, multiple
        self.keep: NDArray[np.bool_] = np.zeros(0, bool)  # whether each prompt sampled so far is useful
        self.rounds = 0
        self.count = target  # prompts of the current round

    @property
    def position(self) -> int:
        """Returns the position of the current round's first prompt."""
        return self.first + len(self.keep)

    def add_round(self, keep: NDArray[np.bool_]) -> bool:
        """Adds which prompts of the current round are useful. Returns True if the step is full or the limit reached."""
        self.keep = np.concatenate([self.keep, keep])
        self.rounds += 1
        useful, sampled = int(self.keep.sum()), len(self.keep)
        if useful >= self.target or sampled >= self.limit:
            return True
        # As many as the rate of useful prompts so far suggests, but never more than a step or the limit.
        expected = -(-(self.target - useful) * sampled // max(useful, 1))
        self.count = min(-(-expected // self.multiple) * self.multiple, self.target, self.limit - sampled)
        return False

    def selected(self) -> Ints:
        """Returns the positions sampled so far that can be part of the step: useful ones first, filled up by others."""
        good, others = np.flatnonzero(self.keep), np.flatnonzero(~self.keep)
        return self.first + np.sort(np.concatenate([good[: self.target], others[: max(0, self.target - len(good))]]))

    def result(self) -> SampledPrompts:
        positions = self.selected()
        filled = max(0, self.target - int(self.keep.sum()))
        end = self.position if filled else int(positions[-1]) + 1
        return SampledPrompts(positions, self.rounds, end, end - self.first - self.target, filled)
