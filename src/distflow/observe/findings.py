"""Finds problems in the metrics of a run. Pure; the page and the terminal show the same."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

RECENT, LONGER = 10, 50  # steps
NO_SIGNAL_FROM, CLIPPED_FROM, IMBALANCE_FROM = 0.5, 0.3, 0.3
STARVED_FROM = 0.1
MISMATCH_FROM, STALE_MISMATCH_FROM, STRAGGLE_FROM, ENTROPY_BELOW = 0.01, 0.1, 1.2, 0.1

Row = Mapping[str, float | None]  # the metrics of a step; None: not a number


@dataclass(frozen=True)
class Finding:
    """A problem in words; `metric` is the one to look at."""

    text: str
    metric: str


def findings(rows: Sequence[Row]) -> list[Finding]:
    """Returns the problems, the most urgent first."""
    found = (check(rows) for check in _CHECKS if rows)
    return [finding for finding in found if finding]


def findings_over_time(rows: Sequence[Row], points: int = 120) -> list[dict[str, Any]]:
    """Returns each problem of the run with the ranges of steps [first, last] in which it was found, oldest first.

    They are looked for at so many points of the run, so that a long one costs no more.
    """
    ends = sorted({-(-len(rows) * i // points) for i in range(1, points + 1)}) if rows else []
    seen: dict[str, dict[str, Any]] = {}
    before: set[str] = set()
    for end in ends:
        step, now = rows[end - 1].get("step"), findings(rows[:end])
        for finding in now:
            entry = seen.setdefault(finding.metric, {"metric": finding.metric, "ranges": []})
            entry["text"] = finding.text
            if finding.metric in before:
                entry["ranges"][-1][1] = step
            else:
                entry["ranges"].append([step, step])
        before = {f.metric for f in now}
    return list(seen.values())


def _mean(rows: Sequence[Row], name: str, count: int = RECENT) -> float | None:
    values = [v for row in rows[-count:] if (v := row.get(name)) is not None]
    return sum(values) / len(values) if values else None


def _last(count: int, rows: Sequence[Row]) -> str:
    steps = sum(row.get("step") != 0 for row in rows[-count:])  # 0: an evaluation before training
    return f"the last {steps} steps" if steps > 1 else f"step {rows[-1].get('step')}"


def _skipped(rows: Sequence[Row]) -> Finding | None:
    for role in ("actor", "critic"):
        count = sum(row.get(f"{role}/skipped_updates") or 0 for row in rows[-RECENT:])
        if count:
            text = f"{count:.0f} updates of the {role} were skipped in {_last(RECENT, rows)}: gradients not finite"
            return Finding(text, f"{role}/skipped_updates")
    return None


def _failures(rows: Sequence[Row]) -> Finding | None:
    count = sum(row.get("reward/failures") or 0 for row in rows[-RECENT:])
    text = f"the reward failed on {count:.0f} samples in {_last(RECENT, rows)}"
    return Finding(text, "reward/failures") if count else None


def _not_applicable(rows: Sequence[Row]) -> Finding | None:
    count = sum(row.get("reward/not_applicable") or 0 for row in rows[-RECENT:])
    text = f"no reward function applied to {count:.0f} samples in {_last(RECENT, rows)}, which have the score 0"
    return Finding(text, "reward/not_applicable") if count else None


def _mismatch(rows: Sequence[Row]) -> Finding | None:
    value, behind = _mean(rows, "rollout/mismatch_kl"), _mean(rows, "rollout/staleness") or 0.0
    if value is None or value < (STALE_MISMATCH_FROM if behind else MISMATCH_FROM):
        return None
    if behind:
        text = f"mismatch {value:.2g}: rollouts are by weights {behind:.2g} steps older, which have moved far; lower"
        return Finding(f"{text} rollout.staleness or train.lr", "rollout/mismatch_kl")
    return Finding(f"mismatch {value:.2g}: the engine and the trainer disagree", "rollout/mismatch_kl")


def _no_signal(rows: Sequence[Row]) -> Finding | None:
    share = _mean(rows, "reward/zero_std_frac")
    if share is None or share < NO_SIGNAL_FROM:
        return None
    return Finding(f"{share:.0%} of groups had no signal in {_last(RECENT, rows)}", "reward/zero_std_frac")


def _clipped(rows: Sequence[Row]) -> Finding | None:
    share = _mean(rows, "response_length/clip_ratio")
    if share is None or share < CLIPPED_FROM:
        return None
    conversations = any(name.startswith("env/") and name.endswith("/turns") for name in rows[-1])
    what = "conversations were ended by" if conversations else "responses were cut off at"
    limits = "environment.max_turns, turn_tokens or rollout.max_tokens" if conversations else "rollout.max_tokens"
    text = f"{share:.0%} of {what} {limits} in {_last(RECENT, rows)}"
    return Finding(text, "response_length/clip_ratio")


def _entropy(rows: Sequence[Row]) -> Finding | None:
    values = [v for row in rows if (v := row.get("actor/entropy")) is not None]
    if len(values) < RECENT or values[0] <= 0 or values[-1] > ENTROPY_BELOW * values[0]:
        return None
    text = f"the entropy of the policy fell from {values[0]:.2g} to {values[-1]:.2g}: it hardly explores any more"
    return Finding(text, "actor/entropy")


def _straggler(rows: Sequence[Row]) -> Finding | None:
    last = [row for row in rows[-LONGER:] if row.get("perf/slowest_rank") is not None]
    if len(last) < 3:
        return None
    rank, times = Counter(int(row["perf/slowest_rank"] or 0) for row in last).most_common(1)[0]
    behind = [row.get("perf/straggle") or 1 for row in last if row["perf/slowest_rank"] == rank]
    ratio = sum(behind) / len(behind)
    if times <= len(last) / 2 or ratio < STRAGGLE_FROM:
        return None
    text = f"rank {rank} is the slowest in {times} of {len(last)} steps, {ratio:.1f} times the mean"
    return Finding(text, "perf/straggle")


def _imbalance(rows: Sequence[Row]) -> Finding | None:
    share = _mean(rows, "data/imbalance")
    if share is None or share < IMBALANCE_FROM:
        return None
    return Finding(f"tokens per worker differ by {share:.0%} in {_last(RECENT, rows)}", "data/imbalance")


def _experts(rows: Sequence[Row]) -> Finding | None:
    share = _mean(rows, "router/starved_frac")
    if share is None or share < STARVED_FROM:
        return None
    text = f"{share:.0%} of the experts starve: they get under a tenth of the mean load in {_last(RECENT, rows)}"
    return Finding(f"{text}; raise train.router_aux_loss", "router/starved_frac")


def _held_out(rows: Sequence[Row]) -> Finding | None:
    """Looks at the first held-out score only: others are usually close to it."""
    name = next((n for row in rows for n in row if n.startswith("val/") and n.endswith("/score")), None)
    values = [(row.get("step"), v) for row in rows if name and (v := row.get(name)) is not None]
    if len(values) < 4:
        return None
    step, best = max(values, key=lambda pair: pair[1])
    spread = sum(abs(b - a) for (_, a), (_, b) in pairwise(values)) / (len(values) - 1)
    below = best - values[-1][1]
    if not name or not below or below < 2 * spread or below < 0.05 * abs(best):
        return None
    return Finding(f"{name} is {values[-1][1]:.3g}, below its best of {best:.3g} in step {step:g}", name)


_CHECKS: tuple[Callable[[Sequence[Row]], Finding | None], ...] = (
    _skipped,
    _failures,
    _not_applicable,
    _mismatch,
    _no_signal,
    _clipped,
    _entropy,
    _held_out,
    _straggler,
    _imbalance,
    _experts,
)
