"""The log of a reward function with TRL's signature logs beside its scores: `log_metric` and `log_extra`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from distflow.errors import shown
from distflow.reward.signature import NoScore, Result, Signature, to_float


class RewardLog:
    """Collects what one call of a function logs, and adds it to the scores of its samples."""

    def __init__(self, samples: int) -> None:
        self._samples = samples
        self._metrics: dict[str, list[float]] = {}
        self._columns: dict[str, list[Any]] = {}

    def log_metric(self, name: str, value: float) -> None:
        """Logs a number; values of the same name in one call are averaged."""
        number = to_float(value)
        if number is None:
            raise TypeError(f"log_metric({name!r}, {shown(value, 40)}): the value is not a number")
        self._metrics.setdefault(str(name), []).append(number)

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Records a value for each sample, in their order."""
        if len(values) != self._samples:
            raise ValueError(f"log_extra({column!r}, …): has {len(values)} values for {self._samples} samples")
        self._columns[str(column)] = [_plain(v) for v in values]

    def arguments(self, signature: Signature) -> dict[str, Callable[..., None]]:
        """Returns the loggers that a function takes; verl's have none."""
        loggers: dict[str, Callable[..., None]] = {"log_metric": self.log_metric, "log_extra": self.log_extra}
        return {n: f for n, f in loggers.items() if signature.kind == "trl" and signature.accepts(n)}

    def add_to(self, results: list[Result]) -> list[Result]:
        if not self._metrics and not self._columns:
            return results
        metrics = {name: sum(values) / len(values) for name, values in self._metrics.items()}
        return [self._with_log(r, i, metrics) for i, r in enumerate(results)]

    def _with_log(self, result: Result, i: int, metrics: Mapping[str, float]) -> Result:
        if isinstance(result, NoScore):
            return result
        columns = {name: values[i] for name, values in self._columns.items()}
        return replace(result, extra={**metrics, **result.extra}, columns=columns)


def _plain(value: Any) -> Any:
    """Returns a value that JSON can express."""
    return value if isinstance(value, str | int | float | bool | None) else shown(value, 1000)
