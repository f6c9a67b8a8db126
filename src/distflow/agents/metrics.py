"""Metrics of the conversations of a step, for each environment."""

from collections.abc import Iterable

from distflow.agents.record import ConversationRecord
from distflow.batch.context import MetricLog


def log_conversations(records: Iterable[ConversationRecord], metrics: MetricLog, prefix: str = "") -> None:
    """Logs `env/<name>/…`; `prefix` is `val/` for held-out samples."""
    for r in records:
        of = f"{prefix}env/{r.environment}"
        metrics.log(f"{of}/reward", r.reward)
        metrics.log(f"{of}/turns", r.turns)
        metrics.log(f"{of}/seconds", r.seconds)
        metrics.log(f"{of}/tool_errors", r.tool_errors, reduce="sum")
        metrics.log(f"{of}/failures", float(r.failure is not None), reduce="sum")
        metrics.log(f"{of}/untrained_branches", r.untrained_branches, reduce="sum")
        metrics.log(f"{of}/untrained_tokens", r.untrained_tokens, reduce="sum")
        for name, value in r.metrics.items():
            metrics.log(f"{of}/{name}", value)
