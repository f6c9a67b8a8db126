"""The reward role: scores responses with the user's own functions, in processes of their own."""

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from distflow.flow import node
from distflow.reward.errors import RewardError
from distflow.reward.function import RewardFunction, functions_of
from distflow.reward.pool import Call, Pool
from distflow.reward.signature import Failure, Result, Score

if TYPE_CHECKING:  # flows are planned without torch
    from distflow.data.batch import Batch
    from distflow.data.context import Context, MetricLog
    from distflow.reward.samples import Samples


@dataclass(frozen=True)
class _Scored:
    """`results[f][i]`: what function f says of sample i."""

    totals: list[float]
    results: list[list[Result]]

    def failures(self) -> list[tuple[int, int, str]]:
        """(sample, function, what happened), in order of samples."""
        by_sample = enumerate(zip(*self.results, strict=True))
        return [(i, f, r.what) for i, row in by_sample for f, r in enumerate(row) if isinstance(r, Failure)]


class Reward:
    """Score = Σ weight · score over the functions. Their processes start at once, in the background.

    `on_failure`: stop with an error, or the score of a sample on which any function fails; the failures are then
    appended to the file `log`. `answer` names the column of the ground truth, `base` is where relative paths begin.
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
            raise RewardError(f"reward.processes: {processes}; at least 1 is needed")
        if not time_limit_s > 0:
            raise RewardError(f"reward.time_limit_s: {time_limit_s}; give a number of seconds above 0")
        is_number = isinstance(on_failure, int | float) and math.isfinite(on_failure)
        if on_failure != "error" and not is_number:
            raise RewardError(f"reward.on_failure: {on_failure!r}; say 'error', or the score of such samples")
        self.functions = functions_of(functions)
        self.on_failure, self.answer, self.log = on_failure, answer, log
        self.pool = Pool(self.functions, processes, time_limit_s, Path(base))

    @node(type="inference", writes=["score"], ignores=("prompt_tokens", "rollout_logprobs", "finished"))
    def score(self, batch: "Batch", ctx: "Context") -> dict[str, Any]:
        """Reads `prompt` and `response`, and what the functions ask for of the other columns."""
        import torch

        from distflow.reward.samples import Samples

        samples = Samples.of(batch)
        restarts = self.pool.restarts
        scored = self._score(samples, self.on_failure)
        failures = scored.failures()
        if failures and self.log and ctx.lead:
            self._write(self.log, [f"step {ctx.step}: {self._told(samples, *f)}" for f in failures])
        if len(samples):
            self._measure(ctx.metrics, scored, samples.sources)
        if ctx.lead:  # replicas fail alike
            ctx.metrics.log("reward/failures", len({i for i, _, _ in failures}), reduce="sum")
        ctx.metrics.log("reward/restarts", self.pool.restarts - restarts, reduce="sum")
        return {"score": torch.tensor(scored.totals, dtype=torch.float32)}

    def try_one(self, sample: Mapping[str, Any], label: int | str = 0) -> float:
        """The score of one sample, a dict by column as in a batch; any failure is an error that names `label`."""
        from distflow.reward.samples import Samples

        return self._score(Samples([label], {name: [value] for name, value in sample.items()}), "error").totals[0]

    def close(self) -> None:
        """Kill the processes and what they have started."""
        self.pool.close()

    def _score(self, samples: "Samples", on_failure: Literal["error"] | float) -> _Scored:
        results: list[list[Result]] = [[Score(None, {})] * len(samples) for _ in self.functions]
        calls, firsts = self._calls(samples)
        with closing(self.pool.run(calls)) as answers:
            for i, found in answers:
                results[calls[i].function][firsts[i] : firsts[i] + len(found)] = found
                failed = [firsts[i] + k for k, r in enumerate(found) if isinstance(r, Failure)]
                if failed and on_failure == "error":
                    first = results[calls[i].function][failed[0]]
                    assert isinstance(first, Failure)
                    raise self._error(samples, failed, calls[i].function, first.what)
        totals = [self._total(row, on_failure) for row in zip(*results, strict=True)]
        return _Scored(totals, results)

    def _calls(self, samples: "Samples") -> tuple[list[Call], list[int]]:
        """All calls, those for many samples first, and the first sample of each."""
        if not len(samples):
            return [], []
        many: list[tuple[Call, int]] = []
        single: list[tuple[Call, int]] = []
        for f, signature in enumerate(self.pool.signatures):
            if signature.kind == "trl":
                many.append((Call(f, samples.trl(signature, self._where(f)), len(samples)), 0))
            else:
                each = samples.verl(signature, self._where(f), self.answer)
                single += [(Call(f, arguments), i) for i, arguments in enumerate(each)]
        both = many + single
        return [call for call, _ in both], [first for _, first in both]

    def _total(self, row: Iterable[Result], on_failure: Literal["error"] | float) -> float:
        total = 0.0
        for function, result in zip(self.functions, row, strict=True):
            if isinstance(result, Failure):
                return float(on_failure)
            total += function.weight * (result.value or 0.0)
        return total

    def _measure(self, metrics: "MetricLog", scored: _Scored, sources: list[str] | None) -> None:
        def mean(name: str, values: Sequence[float]) -> None:
            if values:
                metrics.log(f"reward/{name}mean", sum(values) / len(values), len(values))

        mean("", scored.totals)
        metrics.log("reward/min", min(scored.totals), reduce="min")
        metrics.log("reward/max", max(scored.totals), reduce="max")
        several = len(self.functions) > 1
        for function, results in zip(self.functions, scored.results, strict=True):
            scores = [r for r in results if isinstance(r, Score)]
            if several:
                mean(f"{function.name}/", [s.value for s in scores if s.value is not None])
            for key in dict.fromkeys(k for s in scores for k in s.extra):
                # Two functions may both tell, say, an accuracy.
                prefix = f"{function.name}/" if several else ""
                mean(f"{prefix}{key}/", [s.extra[key] for s in scores if key in s.extra])
        names = [f.name for f in self.functions] if several else []
        for source in filter(None, dict.fromkeys(sources or ())):
            of_source = [t for t, s in zip(scored.totals, sources or (), strict=True) if s == source]
            mean(f"source/{source}/" if source in names else f"{source}/", of_source)

    def _error(self, samples: "Samples", failed: Sequence[int], function: int, what: str) -> RewardError:
        more = f" (and {len(failed) - 1} more of the same call)" if len(failed) > 1 else ""
        return RewardError(
            f"{self._told(samples, failed[0], function, what)}{more};"
            " mend the function, or set `reward.on_failure: 0.0` to give such samples that score"
        )

    def _told(self, samples: "Samples", i: int, function: int, what: str) -> str:
        return f"sample {samples.ids[i]}: {self._where(function)} {what}"

    def _where(self, function: int) -> str:
        return f"reward '{self.functions[function].name}' ({self.functions[function].call})"

    def _write(self, log: Path, lines: Sequence[str]) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab", buffering=0) as file:  # in one piece: other workers write to it, too
            file.write("".join(line + "\n" for line in lines).encode(errors="replace"))
