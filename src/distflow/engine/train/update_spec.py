"""What an update node asks for: the loss, how it is aggregated, and how a step is divided into optimiser steps."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distflow.algo.aggregate import Mode
from distflow.algo.correction import Kind
from distflow.algo.losses import Loss
from distflow.engine.role_context import RoleContext
from distflow.errors import ConfigError, suggest
from distflow.flow.importing import load

PARAMS = ("loss", "aggregate", "mini_batches", "epochs", "rollout_correction", "correction_threshold", "old_logprobs")


@dataclass(frozen=True)
class UpdateSpec:
    """`loss` gives a value per token, `aggregate` says how they become one number."""

    loss: Callable[..., Loss]
    constants: Mapping[str, Any]  # of the loss
    aggregate: Mode
    horizon: int  # tokens of the longest response, for aggregation modes that divide by it
    total_updates: int  # optimiser steps of the whole run, for the learning-rate schedule
    mini_batches: int = 1
    epochs: int = 1
    whole_groups: bool = False  # the loss compares the samples of a prompt: they are in one micro-batch
    correction: tuple[Kind, float] | None = None  # off-policy correction by the rollout's log-probs, and its threshold
    old_logprobs: str | None = None  # the field that the loss sees as `old_logprobs`, if it has another name

    @property
    def several(self) -> bool:
        """Whether later updates of a step are off-policy: the weights are no longer those that generated."""
        return self.mini_batches * self.epochs > 1


def update_spec(
    role: RoleContext,
    *,
    loss: str,
    aggregate: Mode = "token-mean",
    mini_batches: int = 1,
    epochs: int = 1,
    rollout_correction: Kind | None = None,
    correction_threshold: float = 2.0,
    old_logprobs: str | None = None,
    whole_groups: bool = False,
    **constants: Any,
) -> UpdateSpec:
    """Reads the parameters of an update node; those it does not know are constants of the loss."""
    return UpdateSpec(
        find_loss(loss, f"{role.name}.update: loss", role.base, constants),
        constants,
        aggregate,
        role.rollout.max_tokens,
        role.steps * mini_batches * epochs,
        mini_batches,
        epochs,
        whole_groups,
        (rollout_correction, correction_threshold) if rollout_correction else None,
        old_logprobs,
    )


def find_loss(name: str, where: str, base: Path, params: Iterable[str] = ()) -> Any:
    """Returns a built-in loss by its name, any other as `package.module:name` or `file.py:name`.

    `params` are those of the update node: each has to be a parameter of the update or of the loss.
    """
    function = load(name if ":" in name else f"distflow.algo.losses:{name}", where, base)
    if not callable(function):
        raise ConfigError(f"{where}: '{name}' is a {type(function).__name__}, not a function of tokens")
    parameters = inspect.signature(function).parameters
    known = list(parameters)[1:]
    for param in params:
        if param in known or param in PARAMS or any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            continue
        raise ConfigError(
            f"{where}: '{name}' has no parameter '{param}', which the flow passes to it{suggest(param, known)};"
            " a loss that takes `**rest` can pass kl and entropy on to distflow.algo.losses.with_kl_and_entropy"
        )
    return function
