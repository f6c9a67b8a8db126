"""Folders of runs as workers record them, made up: for tests of the page, and for bench/page.py."""

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distflow.flow import Flow, Node
from distflow.observe.spans import span_line
from distflow.plan import Place, Placement, Workload, plan

START = 1_790_000_000_000_000  # microseconds since 1970
WORDS = ("the", "answer", "first", "sorts", "every", "digit", "and", "then", "writes", "them", "in", "order")
GENERATE = {"call": "actor.generate", "role": "actor", "type": "inference", "method": True, "generates": True}
FLOW = Flow(
    "grpo",
    ("prompt", "answer"),
    (
        Node("actor.generate", reads=("prompt",), writes=("tokens", "response"), **GENERATE),  # type: ignore[arg-type]
        Node("reward.score", reads=("response", "answer"), writes=("score",), role="reward", type="inference"),
        Node("group_advantage", reads=("score",), writes=("advantage",), role="advantage", whole_groups=True),
        Node("actor.update", reads=("tokens", "advantage"), role="actor", type="train", method=True),
    ),
)


def write_run(
    folder: Path, steps: int = 4, workers: int = 2, samples_per_step: int = 4, tokens: int = 12, state: str = "ended"
) -> Path:
    """Writes metrics, spans, samples, plan and config of a run with one rollout and one training half."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    (folder / "config.yaml").write_text("flow: grpo\nseed: 0\n")
    (folder / "versions.json").write_text('{"distflow": "0.1.0", "torch": "2.13.0"}\n')
    (folder / "plan.json").write_text(json.dumps(make_plan(workers).to_json()))
    (folder / "state.json").write_text(json.dumps({"state": state, "steps": steps, "time": START / 1e6}))
    rows = [metrics_row(step, steps) for step in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in ("spans", "samples"):
        (folder / name).mkdir(exist_ok=True)
    for rank in range(workers):
        lines = [line for step in range(1, steps + 1) for line in spans_of(rank, workers, step, rng)]
        (folder / "spans" / f"{rank}.jsonl").write_bytes(b"".join(lines))
    per_rank: list[list[str]] = [[] for _ in range(workers)]
    for step in range(1, steps + 1):
        for i in range(samples_per_step):
            sample = sample_of(step, step * samples_per_step + i, i // 2, tokens, rng)
            # As in a run: what was generated is known to one worker, what it was worth to another.
            parts: Sequence[Sequence[str]] = (("advantage", "entropy", "trainer_logprobs"), tuple(sample["fields"]))
            for part, rank in zip(parts, (workers - 1, i % max(1, workers // 2)), strict=True):
                fields = {k: v for k, v in sample["fields"].items() if k in part}
                sample["fields"] = {k: v for k, v in sample["fields"].items() if k not in part}
                per_rank[rank].append(json.dumps({**sample, "fields": fields}, separators=(",", ":")) + "\n")
    for rank, own in enumerate(per_rank):
        (folder / "samples" / f"{rank}.jsonl").write_text("".join(own))
    return folder


def make_plan(workers: int) -> Any:
    half = max(1, workers // 2)
    sets = {"rollout": f"0-{half - 1}", "train": f"{half}-{workers - 1}"} if workers > 1 else {}
    place = Place("train" if workers > 1 else "all")
    rollout = Place("rollout" if workers > 1 else "all")
    nodes = dict.fromkeys(("actor.generate", "reward.score", "data"), rollout)
    return plan(FLOW, Placement(workers, sets, place, {}, nodes), Workload(4 * workers, 4))


def metrics_row(step: int, steps: int) -> dict[str, Any]:
    share = step / max(1, steps)
    row: dict[str, Any] = {"step": step, "time": START / 1e6 + step, "reward/mean": round(1 - math.exp(-3 * share), 4)}
    row |= {"reward/zero_std_frac": 0.62, "actor/entropy": 1 / (1 + share), "timing_max_s/step": 1 + 0.1 * (step % 3)}
    row |= {"perf/slowest_rank": 1, "perf/straggle": 1.4, "data/bytes_sent": 20_000, "data/bytes_local": 8000}
    if step % 2 == 0:
        row["val/all/score"] = round(share, 3)
    return row


def spans_of(rank: int, workers: int, step: int, rng: random.Random) -> list[bytes]:
    """The lines of one worker in one step: one half generates, the other trains, and each waits for the other."""
    at = START + step * 1_000_000
    half, lines = max(1, workers // 2), []
    peers = [r for r in range(workers) if (r < half) != (rank < half)][:8]

    def add(kind: str, name: str, us: int, **details: Any) -> None:
        nonlocal at
        at += us
        lines.append(span_line(at, us, step, kind, name, details))

    slow = rng.randrange(60_000)
    sent = {"sent": 100 * len(peers), "to": {str(p): 100 for p in peers}} if peers else {}
    if rank < half or workers == 1:
        add("load", "load", 2000)
        add("weights", "actor weights", 9000, wait_us=4000, waits_for="1", **sent)
        add("call", "engine", 0, left=[[100_000, 8], [200_000, 2], [250_000, 0]])
        add("inference", "actor.generate", 250_000 + slow, samples=8, tokens=400 + rank)
        add("inference", "reward.score", 20_000, samples=8, tokens=400 + rank)
        add("move", "m1", 5000, **sent)
    if rank >= half or workers == 1:
        wait = START + step * 1_000_000 + 290_000 + slow - at
        add("move", "m1", max(6000, wait), **({"wait_us": max(0, wait - 5000), "waits_for": "0"} if peers else {}))
        add("train", "actor.update", 500_000 + slow, samples=8, tokens=400 + rank)
    wait = START + (step + 1) * 1_000_000 - 20_000 - at
    add("control", "metrics", max(1000, wait), wait_us=max(0, wait - 1000), waits_for="0")
    lines.append(span_line(at, at - START - step * 1_000_000, step, "step", "", {"local": 1000}))
    return lines


def sample_of(step: int, sample: int, group: int, tokens: int, rng: random.Random) -> dict[str, Any]:
    pieces = [" " + rng.choice(WORDS) for _ in range(tokens)]
    score = float(rng.random() < 0.3 + 0.05 * min(step, 10)) if group % 2 else 1.0
    fields = {
        "prompt": [{"role": "user", "content": f"Sort {1000 + group}."}],
        "response": "".join(pieces),
        "prompt_tokens": ["Sort", f" {1000 + group}", "."],
        "response_tokens": pieces,
        "rollout_logprobs": [round(-rng.expovariate(1.5), 4) for _ in pieces],
        "data_source": "digits" if group % 2 else "letters",
        "answer": "0001",
        "finished": True,
        "score": score,
        "advantage": round(score - 0.5, 4),
        "entropy": [round(rng.random(), 4) for _ in pieces],
        "trainer_logprobs": [round(-rng.expovariate(1.5), 4) for _ in pieces],
    }
    return {"step": step, "id": sample, "group": group, "split": "train", "fields": fields}
