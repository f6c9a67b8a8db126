"""The parameters of an update node: the loss, its aggregation, and the optimiser steps of a step."""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from distflow.algo.correction import Correction, Rejection
from distflow.algo.losses import Loss
from distflow.algo.options import AggregateBy, Aggregation, CorrectionKind, RejectionKind
from distflow.algo.tokens import MissingFieldError, Tokens, TopLogprobs
from distflow.errors import ConfigError, FlowError, suggest
from distflow.flow import Flow
from distflow.flow.constants import check_constant
from distflow.flow.graph import SOURCE, Node
from distflow.flow.importing import load
from distflow.roles.context import RoleContext
from distflow.train.packing import EMA_LOGPROBS, OLD, REFERENCE, ROLLOUT, TEACHER_TOP_IDS, TEACHER_TOP_LOGPROBS

HIGH_COVARIANCE = "high_covariance"  # 1 for the tokens whose log-prob and advantage covary most
PARAMS = (
    "loss",
    "aggregate",
    "aggregate_by",
    "mini_batches",
    "epochs",
    "rollout_correction",
    "correction_threshold",
    "correction_lower",
    "rollout_rejection",
    "rejection_threshold",
    "mask_truncated",
    "mask_off_policy",
    "top_entropy",
    "old_logprobs",
    "clip_cov",
    "kl_cov",
    "entropy_target",
    "entropy_step",
    "entropy_max",
)


@dataclass(frozen=True)
class CovarianceChoice:
    """Tokens by the covariance of log-prob and advantage: a `share` of all, the highest or `drawn` from those within
    `bounds`. Drawn ones have no policy term, of the highest a loss reads `high_covariance`."""

    share: float
    bounds: tuple[float, float] = (0.0, math.inf)
    drawn: bool = False


@dataclass(frozen=True)
class EntropyTarget:
    """Makes the weight of the entropy bonus follow the entropy; see distflow.algo.entropy_control."""

    target: float
    step: float
    highest: float


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
    aggregate_by: AggregateBy = "sample"
    rejection: Rejection | None = None  # of what is too far from them
    mask_truncated: bool = False  # leaves out responses that are not `finished`
    mask_off_policy: float | None = None  # threshold of distflow.algo.masks.off_policy_mask
    top_entropy: float = 1.0  # fraction of the tokens, those with the highest `old_entropy`, that have a policy term
    old_logprobs: str | None = None  # the field that the loss sees as `old_logprobs`, if it has another name
    covariance: CovarianceChoice | None = None  # the tokens to treat apart by their covariance
    entropy: EntropyTarget | None = None  # adapts the weight of the entropy bonus

    @property
    def several(self) -> bool:
        """Returns whether later updates of a step are off-policy: the weights have changed since the rollout."""
        return self.mini_batches * self.epochs > 1


def update_spec(
    role: RoleContext,
    *,
    loss: str,
    aggregate: Aggregation = "token-mean",
    aggregate_by: AggregateBy = "sample",
    mini_batches: int = 1,
    epochs: int = 1,
    rollout_correction: CorrectionKind | None = None,
    correction_threshold: float = 2.0,
    correction_lower: float | None = None,
    rollout_rejection: RejectionKind | None = None,
    rejection_threshold: float = 2.0,
    mask_truncated: bool = False,
    mask_off_policy: float | None = None,
    top_entropy: float = 1.0,
    old_logprobs: str | None = None,
    clip_cov: Mapping[str, float] | None = None,
    kl_cov: float | None = None,
    entropy_target: float | None = None,
    entropy_step: float = 0.005,
    entropy_max: float = 1.0,
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
        aggregate_by,
        Rejection(rollout_rejection, rejection_threshold) if rollout_rejection else None,
        mask_truncated,
        mask_off_policy,
        top_entropy,
        old_logprobs,
        _covariance(clip_cov, kl_cov),
        None if entropy_target is None else EntropyTarget(entropy_target, entropy_step, entropy_max),
    )


def _covariance(clip_cov: Mapping[str, float] | None, kl_cov: float | None) -> CovarianceChoice | None:
    if clip_cov is not None:
        return CovarianceChoice(clip_cov["share"], (clip_cov["low"], clip_cov["high"]), drawn=True)
    return None if kl_cov is None else CovarianceChoice(kl_cov)


def check_losses(flow: Flow, base: Path) -> None:
    """Raises if a node names an unknown loss, or one that does not take its constants or needs fields it has not."""
    for node in (n for n in flow.nodes if n.type == "train"):
        assert node.fn is not None
        parameter = inspect.signature(node.fn).parameters.get("loss")
        loss = node.params.get("loss", parameter.default if parameter else None)
        if isinstance(loss, str):
            function = find_loss(loss, f"node '{node.id}': loss", base, node.params)
            _check_reads(function, loss, node, flow)
        if kind := node.params.get("rollout_rejection"):
            Rejection(kind, node.params.get("rejection_threshold", 2.0))  # raises if they do not fit each other


def _check_reads(function: Callable[..., Any], name: str, node: Node, flow: Flow) -> None:
    """Tries a loss on made-up tokens, which tell the first field that it needs and its node does not read."""
    read = {node.local_name(f) for f in node.reads}
    fields = {*read, "pair"} if node.whole_groups else read
    if "old_logprobs" in node.params or (ROLLOUT in read and _several(node.params)):
        fields = {*fields, OLD}
    if "kl_cov" in node.params:
        fields = {*fields, HIGH_COVARIANCE}
    if EMA_LOGPROBS in read:
        fields = {*fields, REFERENCE}
    logprobs = torch.full((3,), -1.0, requires_grad=True)
    top = None
    if {TEACHER_TOP_IDS, TEACHER_TOP_LOGPROBS} <= read:
        top = TopLogprobs(logprobs[:, None], torch.full((3, 1), -1.0))
    tokens = Tokens(logprobs, torch.tensor([2, 1]), {f: torch.ones(3) for f in fields}, entropy=-logprobs, top=top)
    where = f"node '{node.id}': the loss '{name}'"
    try:
        result = function(tokens, **{k: v for k, v in node.params.items() if k not in PARAMS})
    except MissingFieldError as e:
        writer = flow.writer.get(node.prefix + e.name)
        if writer is None:
            advice = f"no node writes it{suggest(e.name, flow.writer)}"
        else:
            source = f"prompts['{e.name}']" if writer == SOURCE else f"the result of '{writer}'"
            advice = f"pass {source} to {node.id} (in a list of nodes: add '{e.name}' to its reads)"
        raise FlowError(f"{where} needs the field '{e.name}', which the node does not read; {advice}") from None
    except AttributeError as e:
        if e.obj is tokens:
            raise FlowError(f"{where} asks for tokens.{e.name}; a field of the batch is tokens['{e.name}']") from None
        return
    except ConfigError as e:
        raise FlowError(f"node '{node.id}': {e}") from None
    except Exception:  # on values that no step has; what else is wrong, the first step says
        return
    if not isinstance(result, Loss):
        raise FlowError(f"{where} returns a {type(result).__name__}; return a distflow.Loss, a value per token")


def _several(params: Mapping[str, Any]) -> bool:
    return (params.get("mini_batches", 1), params.get("epochs", 1)) != (1, 1)


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
