"""The reward role: scores responses with users' functions, which run in a pool of processes."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from distflow.batch.scores import NOT_SCORED
from distflow.flow import node
from distflow.reward.errors import RewardError
from distflow.reward.function import RewardSpec, parse_functions
from distflow.reward.pool import Pool, RewardCall
from distflow.reward.scores import Scores
from distflow.reward.signature import NoScore, Result, Score
from distflow.roles.role import Role
from distflow.run_folder import SUSPICIOUS
from distflow.util.patient_files import SharedLog

if TYPE_CHECKING:  # flows are planned without torch
    from distflow.batch.batch import Batch
    from distflow.batch.context import Context
    from distflow.reward.samples import Samples


_MARKED_PER_STEP = 16  # suspicious samples that a worker writes to the log


class Reward(Role):
    """Scores a sample with the weighted sum of the functions' scores. Its processes start in the background.

    If a function fails on a sample, `on_failure` is either "error" or the score that sample gets; in the latter case
    failures are appended to the file `log`. Samples that a function marks as suspicious are appended to
    `suspicious.jsonl` beside it. `answer` names the column of the ground truth; relative paths start at
    `base`.
    """

    def __init__(
        self,
        functions: Sequence[RewardSpec | Mapping[str, Any]],
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
        self.on_failure, self.answer = on_failure, answer
        self.log = SharedLog(log) if log else None
        self.suspicious = SharedLog(log.with_name(SUSPICIOUS)) if log else None
        self.pool = Pool(self.functions, processes, time_limit_s, Path(base))

    @node(type="inference", writes="score", ignores=NOT_SCORED)
    def score(self, batch: "Batch", ctx: "Context") -> dict[str, Any]:
        """Reads `prompt`, `response`, and the other columns that the functions have parameters for."""
        import torch

        return {"score": torch.tensor(self._scored(batch, ctx).totals, dtype=torch.float32)}

    @node(type="inference", writes=("score", "scores", "score_weights"), ignores=NOT_SCORED)
    def score_each(self, batch: "Batch", ctx: "Context") -> dict[str, Any]:
        """Scores like `score`; `scores` has that of each function, NaN where it does not apply, and their weights."""
        import torch

        scored = self._scored(batch, ctx)
        weights = torch.tensor([f.weight for f in self.functions])
        each = torch.tensor(scored.each(), dtype=torch.float32).reshape(len(batch), len(weights))
        return {
            "score": torch.tensor(scored.totals, dtype=torch.float32),
            "scores": each,
            "score_weights": weights.expand(len(batch), -1).clone(),
        }

    def _scored(self, batch: "Batch", ctx: "Context") -> Scores:
        """Scores a batch, and logs what there is to say about it."""
        from distflow.reward.samples import Samples

        samples = Samples.of(batch)
        restarts = self.pool.restarts
        scores = self._score(samples, self.on_failure, _trainer_state(ctx))
        failures = scores.failures()
        if failures and self.log and ctx.is_dp_leader:
            described = [f"{self._describe_failure(samples, *f)}\n{samples.excerpt(f[0])}" for f in failures]
            self.log.append(f"step {ctx.step}: {text}" for text in described)
        if self.suspicious and ctx.is_dp_leader and (lines := list(_marked_samples(ctx.step, samples, scores))):
            self.suspicious.append(lines)
        if len(samples):
            scores.log(ctx.metrics, samples.sources)
            if ctx.held_out:
                scores.log_held_out(ctx.metrics, samples.sources)
        if missing := scores.not_applicable():
            ctx.metrics.log("reward/not_applicable", len(missing), reduce="sum")
        if columns := scores.columns():
            ctx.record.sample(batch.ids, columns)
        ctx.metrics.log("reward/failures", len({i for i, _, _ in failures}), reduce="sum")
        ctx.metrics.log("reward/restarts", self.pool.restarts - restarts, reduce="sum")
        return scores

    def score_one(self, sample: Mapping[str, Any], label: int | str = 0) -> float:
        """Returns the score of one sample, a dict by column; a failure is an error that names the sample `label`."""
        from distflow.reward.samples import Samples

        samples = Samples([label], {name: [value] for name, value in sample.items()})
        return self._score(samples, "error", {"global_step": 0}).totals[0]

    def check_fields(self, fields: Iterable[str], where: str = "") -> None:
        """Raises if a function needs a field that is not among those it will get; `where` starts the message."""
        from distflow.reward.samples import Samples

        try:
            self._calls(Samples([], {name: [] for name in fields}), {})
        except RewardError as e:
            raise RewardError(f"{where}{e}") from None

    def close(self) -> None:
        """Kills the processes and everything they have started."""
        self.pool.close()

    def _score(self, samples: "Samples", on_failure: Literal["error"] | float, state: Mapping[str, Any]) -> Scores:
        results: list[list[Result]] = [[Score(None, {})] * len(samples) for _ in self.functions]
        calls, firsts = self._calls(samples, state)
        with closing(self.pool.run(calls)) as finished:
            for i, call_results in finished:
                function, first = calls[i].function, firsts[i]
                results[function][first : first + len(call_results)] = call_results
                failed = [(first + k, r.reason) for k, r in enumerate(call_results) if isinstance(r, NoScore)]
                if failed and on_failure == "error":
                    raise self._error(samples, failed, function)
        totals = [self._total(row, on_failure) for row in zip(*results, strict=True)]
        return Scores(totals, results, [f.name for f in self.functions])

    def _calls(self, samples: "Samples", state: Mapping[str, Any]) -> tuple[list[RewardCall], list[int]]:
        """Returns the calls, those for many samples first, and the first sample of each."""
        batched: list[tuple[RewardCall, int]] = []
        single: list[tuple[RewardCall, int]] = []
        for f, signature in enumerate(self.pool.signatures):
            if signature.kind == "trl":
                arguments = samples.trl_arguments(signature, self._where(f), state)
                batched += [(RewardCall(f, arguments, len(samples)), 0)] if len(samples) else []
            else:
                each = samples.verl_arguments(signature, self._where(f), self.answer)
                single += [(RewardCall(f, values), i) for i, values in enumerate(each)]
        calls = batched + single
        return [call for call, _ in calls], [first for _, first in calls]

    def _total(self, row: Iterable[Result], on_failure: Literal["error"] | float) -> float:
        total = 0.0
        for function, result in zip(self.functions, row, strict=True):
            if isinstance(result, NoScore):
                return float(on_failure)
            total += function.weight * (result.value or 0.0)
        return total

    def _error(self, samples: "Samples", failed: Sequence[tuple[int, str]], function: int) -> RewardError:
        sample, reason = failed[0]
        more = f" (and {len(failed) - 1} more of the same call)" if len(failed) > 1 else ""
        return RewardError(
            f"{self._describe_failure(samples, sample, function, reason)}{more};"
            " fix the function, or set `reward.on_failure: 0.0` to give such samples that score"
            f"\n{samples.excerpt(sample)}"
        )

    def _describe_failure(self, samples: "Samples", sample: int, function: int, reason: str) -> str:
        return f"sample {samples.ids[sample]}: {self._where(function)} {reason}"

    def _where(self, function: int) -> str:
        return f"reward '{self.functions[function].name}' ({self.functions[function].call})"


def _trainer_state(ctx: "Context") -> dict[str, int]:
    """Returns the attributes of TRL's `trainer_state`: updates so far, and of the whole run."""
    return {"global_step": ctx.step if ctx.held_out else ctx.step - 1, "max_steps": ctx.steps}


def _marked_samples(step: int, samples: "Samples", scores: Scores) -> Iterator[str]:
    """Yields the suspicious samples of a step as lines of JSON, those with the highest scores first."""
    reasons = scores.suspicious()
    marked = [i for i, reason in enumerate(reasons) if reason]
    for i in sorted(marked, key=lambda i: -scores.totals[i])[:_MARKED_PER_STEP]:
        row = {"step": step, "sample": samples.ids[i], "score": scores.totals[i], "suspicious": reasons[i]}
        yield json.dumps({**row, "response": samples["response"][i]}, ensure_ascii=False)
