"""The reward role: scores responses with users' functions, which run in a pool of processes."""

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from distflow.flow import node
from distflow.reward.errors import RewardError
from distflow.reward.function import RewardFunction, parse_functions
from distflow.reward.pool import Call, Pool
from distflow.reward.signature import Failure, Result, Score

if TYPE_CHECKING:  # flows are planned without torch
    from distflow.data.batch import Batch
    from distflow.data.context import Context, MetricLog
    from distflow.reward.samples import Samples


@dataclass(frozen=True)
class _Scores:
    """The total of each sample; `results[f][i]` is the result of function f for sample i."""

    totals: list[float]
    results: list[list[Result]]

    def failures(self) -> list[tuple[int, int, str]]:
        """Returns (sample, function, reason) of every failure, in order of samples."""
        by_sample = enumerate(zip(*self.results, strict=True))
        return [(i, f, r.reason) for i, row in by_sample for f, r in enumerate(row) if isinstance(r, Failure)]


class Reward:
    """Scores a sample with the weighted sum of the functions' scores. Its processes start in the background.

    If a function fails on a sample, `on_failure` is either "error" or the score that sample gets; in the latter case
    failures are appended to the file `log`. `answer` names the column of the ground truth; relative paths start at
    `base`.
    """

    def __init__(
        self,
        functions: Sequence[RewardFunction | Mapping[str, Any]],
        processes: int = 2,
        time_limit_s: float = 30.0,
        on_failure: Literal["error"] | float = "error",
        answer: str | None = None,
        base: Path = Path(),
        log: Path | None = None,
    ) -> None:
        if processes < 1:
            raise RewardError(f"reward.processes is {processes}; set it to 1 or more")
        if not time_limit_s > 0:
            raise RewardError(f"reward.time_limit_s is {time_limit_s}; set it to a number of seconds above 0")
        is_number = isinstance(on_failure, int | float) and math.isfinite(on_failure)
        if on_failure != "error" and not is_number:
            raise RewardError(f"reward.on_failure is {on_failure!r}; set it to 'error' or to a finite score")
        self.functions = parse_functions(functions)
        self.on_failure, self.answer, self.log = on_failure, answer, log
        self.pool = Pool(self.functions, processes, time_limit_s, Path(base))

    @node(type="inference", writes=["score"], ignores=("prompt_tokens", "rollout_logprobs", "finished"))
    def score(self, batch: "Batch", ctx: "Context") -> dict[str, Any]:
        """Reads `prompt`, `response`, and the other columns that the functions have parameters for."""
        import torch

        from distflow.reward.samples import Samples

        samples = Samples.of(batch)
        restarts = self.pool.restarts
        scores = self._score(samples, self.on_failure)
        failures = scores.failures()
        if failures and self.log and ctx.lead:
            lines = [f"step {ctx.step}: {self._describe_failure(samples, *f)}" for f in failures]
            _append_lines(self.log, lines)
        if len(samples):
            self._log_metrics(ctx.metrics, scores, samples.sources)
        if ctx.lead:  # replicas of a sample fail alike and count once
            ctx.metrics.log("reward/failures", len({i for i, _, _ in failures}), reduce="sum")
        ctx.metrics.log("reward/restarts", self.pool.restarts - restarts, reduce="sum")
        return {"score": torch.tensor(scores.totals, dtype=torch.float32)}

    def score_one(self, sample: Mapping[str, Any], label: int | str = 0) -> float:
        """Returns the score of one sample, a dict by column; a failure is an error that names the sample `label`."""
        from distflow.reward.samples import Samples

        return self._score(Samples([label], {name: [value] for name, value in sample.items()}), "error").totals[0]

    def close(self) -> None:
        """Kills the processes and everything they have started."""
        self.pool.close()

    def _score(self, samples: "Samples", on_failure: Literal["error"] | float) -> _Scores:
        results: list[list[Result]] = [[Score(None, {})] * len(samples) for _ in self.functions]
        calls, firsts = self._calls(samples)
        with closing(self.pool.run(calls)) as finished:
            for i, call_results in finished:
                function, first = calls[i].function, firsts[i]
                results[function][first : first + len(call_results)] = call_results
                failed = [(first + k, r.reason) for k, r in enumerate(call_results) if isinstance(r, Failure)]
                if failed and on_failure == "error":
                    raise self._error(samples, failed, function)
        totals = [self._total(row, on_failure) for row in zip(*results, strict=True)]
        return _Scores(totals, results)

    def _calls(self, samples: "Samples") -> tuple[list[Call], list[int]]:
        """Returns the calls, those for many samples first, and the first sample of each."""
        if not len(samples):
            return [], []
        batched: list[tuple[Call, int]] = []
        single: list[tuple[Call, int]] = []
        for f, signature in enumerate(self.pool.signatures):
            if signature.kind == "trl":
                batched.append((Call(f, samples.trl_arguments(signature, self._where(f)), len(samples)), 0))
            else:
                each = samples.verl_arguments(signature, self._where(f), self.answer)
                single += [(Call(f, arguments), i) for i, arguments in enumerate(each)]
        calls = batched + single
        return [call for call, _ in calls], [first for _, first in calls]

    def _total(self, row: Iterable[Result], on_failure: Literal["error"] | float) -> float:
        total = 0.0
        for function, result in zip(self.functions, row, strict=True):
            if isinstance(result, Failure):
                return float(on_failure)
            total += function.weight * (result.value or 0.0)
        return total

    def _log_metrics(self, metrics: "MetricLog", scores: _Scores, sources: list[str] | None) -> None:
        def log_mean(name: str, values: Sequence[float]) -> None:
            if values:
                metrics.log(f"reward/{name}mean", sum(values) / len(values), len(values))

        log_mean("", scores.totals)
        metrics.log("reward/min", min(scores.totals), reduce="min")
        metrics.log("reward/max", max(scores.totals), reduce="max")
        several = len(self.functions) > 1
        for function, results in zip(self.functions, scores.results, strict=True):
            valid = [r for r in results if isinstance(r, Score)]
            if several:
                log_mean(f"{function.name}/", [s.value for s in valid if s.value is not None])
            for key in dict.fromkeys(k for s in valid for k in s.extra):
                # Two functions may both return, say, an accuracy.
                prefix = f"{function.name}/" if several else ""
                log_mean(f"{prefix}{key}/", [s.extra[key] for s in valid if key in s.extra])
        names = [f.name for f in self.functions] if several else []
        for source in filter(None, dict.fromkeys(sources or ())):
            totals = [t for t, s in zip(scores.totals, sources or (), strict=True) if s == source]
            log_mean(f"source/{source}/" if source in names else f"{source}/", totals)

    def _error(self, samples: "Samples", failed: Sequence[tuple[int, str]], function: int) -> RewardError:
        sample, reason = failed[0]
        more = f" (and {len(failed) - 1} more of the same call)" if len(failed) > 1 else ""
        return RewardError(
            f"{self._describe_failure(samples, sample, function, reason)}{more};"
            " fix the function, or set `reward.on_failure: 0.0` to give such samples that score"
        )

    def _describe_failure(self, samples: "Samples", sample: int, function: int, reason: str) -> str:
        return f"sample {samples.ids[sample]}: {self._where(function)} {reason}"

    def _where(self, function: int) -> str:
        return f"reward '{self.functions[function].name}' ({self.functions[function].call})"


def _append_lines(path: Path, lines: Sequence[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab", buffering=0) as file:  # one write: other workers append to the same file
        file.write("".join(line + "\n" for line in lines).encode(errors="replace"))
