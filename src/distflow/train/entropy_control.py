"""Adapts the weight of the entropy bonus after each update, by the mean entropy of its tokens on all workers."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from distflow.algo.entropy_control import applied_weight, entropy_weight
from distflow.train.update_spec import EntropyTarget


class EntropyControl:
    """The weight of the bonus, and the entropy of the update before: state of a trainer."""

    def __init__(self) -> None:
        self.weight: float | None = None  # None before the first update: that of the config
        self.entropy: float | None = None
        self._sum: Tensor | None = None

    def applied(self, target: EntropyTarget, initial: float) -> float:
        """Returns the weight of the next update."""
        self.weight = initial if self.weight is None else self.weight
        return applied_weight(self.weight, self.entropy, target.target)

    def add(self, entropy: Tensor) -> None:
        """Takes up the tokens of a micro-batch."""
        total = entropy.detach().double().sum()
        self._sum = total if self._sum is None else self._sum + total

    def adapt(self, target: EntropyTarget, tokens: int, add_up: Callable[[Tensor], Tensor]) -> None:
        """Sets the weight after an update on so many tokens; all workers call it, with samples or without."""
        assert self.weight is not None
        total = torch.zeros((), dtype=torch.float64) if self._sum is None else self._sum
        self.entropy, self._sum = float(add_up(total)) / max(tokens, 1), None
        self.weight = entropy_weight(self.weight, self.entropy, target.target, target.step, target.highest)

    def state(self) -> dict[str, Any]:
        return {} if self.weight is None else {"entropy": [self.weight, self.entropy]}

    def restore(self, values: Mapping[str, Any]) -> None:
        if "entropy" in values:
            self.weight, self.entropy = values["entropy"]
