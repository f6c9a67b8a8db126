"""Common parts of rewards and judges: the fields that they do not read, and the metrics of scores."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # flows are planned without torch
    from distflow.batch.context import MetricLog

# Fields of a rollout that say how its tokens came about; `response`, `conversation` and others say what was written.
NOT_SCORED = (
    "prompt_tokens",
    "rollout_logprobs",
    "response_mask",
    "response_branches",
    "turn_rewards",
    "finished",
    "weight_version",
    "token_versions",
)


def log_scores(metrics: "MetricLog", scores: Sequence[float]) -> None:
    """Logs `reward/mean`, `reward/min` and `reward/max`; of no samples, nothing."""
    if scores:
        metrics.log("reward/mean", sum(scores) / len(scores), len(scores))
        metrics.log("reward/min", min(scores), reduce="min")
        metrics.log("reward/max", max(scores), reduce="max")
