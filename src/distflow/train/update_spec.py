"""The parameters of an update node: the loss, its aggregation, and the optimiser steps of a step."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from distflow.algo.correction import Correction
from distflow.algo.losses import Loss
from distflow.algo.options import Aggregation, CorrectionKind
from distflow.errors import ConfigError, suggest
from distflow.flow import Flow
from distflow.flow.constants import check_constant
from distflow.flow.importing import load
from distflow.roles.context import RoleContext

PARAMS = (
    "loss",
    "aggregate",
    "mini_batches",
    "epochs",
    "rollout_correction",
    "correction_threshold",
    "correction_lower",
    "old_logprobs",
)


@dataclass(frozen=True)
class UpdateSpec:
    """`loss` returns a value per token; `aggregate` reduces them to one number."""

    loss: Callable[..., Loss]
    constants: Mapping[str, Any]  # of the loss
    aggregate: Aggregation
    horizon: int  # tokens of the longest response, for aggregation modes that divide by it
    total_updates: int  # optimiser steps of the whole run, for the learning-rate schedule
    mini_batches: int = 1
    epochs: int = 1
    whole_groups: bool = False  # the loss compares the samples of a prompt, so they are in one micro-batch
    correction: Correction | None = None  # off-policy correction by the rollout's log-probs
    old_logprobs: str | None = None  # the field that the loss sees as `old_logprobs`, if it has another name

    @property
    def several(self) -> bool:
        """Whether later updates of a step are off-policy: the weights have changed since the rollout."""
        return self.mini_batches * self.epochs > 1


def update_spec(
    role: RoleContext,
    *,
    loss: str,
    aggregate: Aggregation = "token-mean",
    mini_batches: int = 1,
    epochs: int = 1,
    rollout_correction: CorrectionKind | None = None,
    correction_threshold: float = 2.0,
    correction_lower: float | None = None,
    old_logprobs: str | None = None,
    whole_groups: bool = False,
    **constants: Any,
) -> UpdateSpec:
    """Reads the parameters of an update node; unknown ones are constants of the loss."""
    return UpdateSpec(
        find_loss(loss, f"{role.name}.update: loss", role.base, constants),
        constants,
        aggregate,
        role.rollout.max_tokens,
        role.steps * mini_batches * epochs,
        mini_batches,
        epochs,
        whole_groups,
        Correction(rollout_correction, correction_threshold, correction_lower) if rollout_correction else None,
        old_logprobs,
    )


def check_losses(flow: Flow, base: Path) -> None:
    """Raises if a node of a flow names an unknown loss, or a loss that does not take its constants."""
    for node in (n for n in flow.nodes if n.type == "train"):
        assert node.fn is not None
        parameter = inspect.signature(node.fn).parameters.get("loss")
        loss = node.params.get("loss", parameter.default if parameter else None)
        if isinstance(loss, str):
            find_loss(loss, f"node '{node.id}': loss", base, node.params)


def find_loss(name: str, where: str, base: Path, params: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """Returns a built-in loss by its name, any other as `package.module:name` or `file.py:name`.

    `params` of the update node must be parameters of the update or of the loss, and fit their types.
    """
    function = load(name if ":" in name else f"distflow.algo.losses:{name}", where, base)
    if not callable(function):
        raise ConfigError(f"{where}: '{name}' is a {type(function).__name__}, not a function of tokens")
    parameters = inspect.signature(function).parameters
    known = list(parameters)[1:]
    for param, value in params.items():
        if param in known:
            check_constant(function, param, value, f"{where}: constant '{param}'")
        elif param not in PARAMS and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            raise ConfigError(
                f"{where}: '{name}' has no parameter '{param}', which the flow passes to it{suggest(param, known)};"
                " a loss that takes `**rest` can pass kl and entropy on to distflow.algo.losses.with_kl_and_entropy"
            )
    return function
