"""Logs the metrics of scores, of rewards and of judges alike."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # flows are planned without torch
    from distflow.batch.context import MetricLog


def log_scores(metrics: "MetricLog", scores: Sequence[float]) -> None:
    """Logs `reward/mean`, `reward/min` and `reward/max`; of no samples, nothing."""
    if scores:
        metrics.log("reward/mean", sum(scores) / len(scores), len(scores))
        metrics.log("reward/min", min(scores), reduce="min")
        metrics.log("reward/max", max(scores), reduce="max")
