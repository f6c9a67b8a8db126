"""The scores of a batch, and the metrics that follow from them."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distflow.batch.scores import log_scores
from distflow.reward.signature import SUSPICIOUS, NoScore, Result, Score

if TYPE_CHECKING:  # flows are planned without torch
    from distflow.batch.context import MetricLog

ALL = "all"  # the source of held-out samples without `data_source`


@dataclass(frozen=True)
class Scores:
    """The total of each sample; `results[f][i]` is the result of function f, called `names[f]`, for sample i."""

    totals: list[float]
    results: list[list[Result]]
    names: list[str]

    def failures(self) -> list[tuple[int, int, str]]:
        """Returns (sample, function, reason) of every failure, in order of samples."""
        return [(i, f, r.reason) for i, row in self._rows() for f, r in enumerate(row) if isinstance(r, NoScore)]

    def each(self) -> list[list[float]]:
        """Returns the score of every function for every sample; NaN where it failed or does not apply."""

        def value(result: Result) -> float:
            return result.value if isinstance(result, Score) and result.value is not None else math.nan

        return [[value(r) for r in row] for _, row in self._rows()]

    def not_applicable(self) -> list[int]:
        """Returns the samples for which every function returned None."""
        return [i for i, row in self._rows() if all(isinstance(r, Score) and r.value is None for r in row)]

    def columns(self) -> dict[str, list[Any]]:
        """Returns the columns that functions added beside their scores; None where they added nothing."""
        rows = [{k: v for r in row if isinstance(r, Score) for k, v in r.columns.items()} for _, row in self._rows()]
        return {name: [row.get(name) for row in rows] for name in dict.fromkeys(n for row in rows for n in row)}

    def suspicious(self) -> list[str | None]:
        """Returns the reasons to suspect each sample, None where no function looks for any."""
        rows = [[r.columns.get(SUSPICIOUS) for r in row if isinstance(r, Score)] for _, row in self._rows()]
        checked = [[str(reason) for reason in row if reason is not None] for row in rows]
        return ["; ".join(filter(None, row)) if row else None for row in checked]

    def log(self, metrics: "MetricLog", sources: list[str] | None) -> None:
        """Logs `reward/…`: the mean, the range, and the means of each function, further number and data source."""
        log_scores(metrics, self.totals)
        marks = [None if reason is None else float(bool(reason)) for reason in self.suspicious()]
        _log_mean(metrics, "reward/suspicious_frac", marks)
        for name, values in self._numbers():
            _log_mean(metrics, f"reward/{name}/mean", values)
        names = self.names if len(self.names) > 1 else []
        for source in filter(None, dict.fromkeys(sources or ())):
            totals = [t for t, s in zip(self.totals, sources or (), strict=True) if s == source]
            _log_mean(metrics, f"reward/{'source/' if source in names else ''}{source}/mean", totals)

    def log_held_out(self, metrics: "MetricLog", sources: list[str] | None) -> None:
        """Logs `val/<source>/<name>`: the means of each function and further number. `report` logs the score."""
        by_sample = [s or ALL for s in sources or [ALL] * len(self.totals)]
        for name, values in self._numbers():
            for source in dict.fromkeys(by_sample):
                own = [v for v, s in zip(values, by_sample, strict=True) if s == source]
                _log_mean(metrics, f"val/{source}/{name}", own)

    def _rows(self) -> Iterator[tuple[int, tuple[Result, ...]]]:
        return enumerate(zip(*self.results, strict=True))

    def _numbers(self) -> Iterator[tuple[str, list[float | None]]]:
        """Yields (name, value of each sample) of every number that functions returned, except the total."""
        several = len(self.names) > 1
        for name, results in zip(self.names, self.results, strict=True):
            scores = [r if isinstance(r, Score) else Score(None, {}) for r in results]
            if several:
                yield name, [s.value for s in scores]
            for key in dict.fromkeys(k for s in scores for k in s.extra):
                # Two functions may both return, say, an accuracy.
                yield f"{name}/{key}" if several else key, [s.extra.get(key) for s in scores]


def _log_mean(metrics: "MetricLog", name: str, values: Sequence[float | None]) -> None:
    numbers = [v for v in values if v is not None]
    if numbers:
        metrics.log(name, sum(numbers) / len(numbers), len(numbers))
