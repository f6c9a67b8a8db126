"""How much time it saves that ranks that generate run ahead, that samples leave in chunks, and partial rollouts.

All stages sleep, so the cores do not decide; workers, plan, moves, weight sync and metrics are those of a run. With a
heavy tail (log-normal lengths, σ 1), all that follows generation but the update, such as scores, reference log-probs
and values, takes 0.8 s, of the order of generation. `--svg FILE` draws what each worker did, before and after.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import numpy as np
import yaml

from overlap_flow import slots_in_order

HERE = Path(__file__).parent
BATCH, N, CELLS, CHUNK = 32, 2, 2, 2  # prompts, samples of each, workers that generate, prompts of a chunk
STEPS, SKIPPED = 12, 4  # the first steps are not measured: workers start, pipelines fill
EQUAL = {"token_s": 0.4, "slots": 32, "update_s": 0.4, "sigma": 0.0, "score_s": 0.0}
TAILED = {"token_s": 0.15, "slots": 16, "update_s": 0.2, "sigma": 1.0, "score_s": 0.8}
COLORS = {"generate": "#2b66c4", "score": "#b56500", "update": "#1d7f46"}
Stage = tuple[int, str, float, float]  # step, name, start, end


def run(folder: Path, name: str, times: dict[str, float], **rollout: Any) -> list[list[Stage]]:
    """Returns the stages of every worker."""
    actor = {k: times[k] for k in ("token_s", "slots", "update_s", "sigma")}
    config = {
        "flow": f"{HERE / 'overlap_flow.py'}:stages",
        "data": {"files": str(folder / "data.jsonl"), "batch": BATCH},
        "steps": STEPS,
        "workers": 4,
        "roles": {
            "actor": {"call": f"{HERE / 'overlap_flow.py'}:Actor", "args": actor},
            "judge": {
                "call": f"{HERE / 'overlap_flow.py'}:Judge",
                "args": {"score_s": times["score_s"], "samples": BATCH * N},
            },
        },
        "placement": {
            "ranks": {"rollout": "0-1", "judge": "2", "train": "3"},
            "default": {"ranks": "train"},
            "nodes": {"actor.generate": {"ranks": "rollout"}, "judge.score": {"ranks": "judge"}},
        },
        "rollout": {"n": N, **rollout},
        "checkpoint": {"every": 0},
        "run_dir": str(folder / name),
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config))
    subprocess.run([sys.executable, "-m", "distflow", "run", str(path)], check=True, stdout=subprocess.DEVNULL)
    files = [folder / name / f"stages.{rank}.jsonl" for rank in range(4)]
    return [[tuple(json.loads(line)) for line in f.read_text().splitlines()] for f in files]


def step_s(stages: list[list[Stage]]) -> float:
    ends = {step: end for own in stages for step, name, _, end in own if name == "update"}
    return (ends[STEPS] - ends[SKIPPED]) / (STEPS - SKIPPED)


def streaming_bound(times: dict[str, float]) -> float:
    """Returns the most that chunks can gain: all but the last of them are scored while others are generated."""
    lengths = np.exp(times["sigma"] * normals() - times["sigma"] ** 2 / 2) * times["token_s"]
    shares = lengths.reshape(STEPS - SKIPPED, CELLS, -1)
    generate = np.mean([max(slots_in_order(c, int(times["slots"]))[1].max() for c in step) for step in shares])
    score, update = times["score_s"], times["update_s"]
    return float((generate + score + update) / (max(generate + score * CHUNK / BATCH, score) + update))


def normals() -> Any:
    """Returns the noise of the lengths of all samples of the measured steps."""
    ids = range(SKIPPED * BATCH * N, STEPS * BATCH * N)
    return np.array([np.random.default_rng(i).standard_normal() for i in ids])


def bubble(stages: list[list[Stage]], names: tuple[str, ...]) -> float:
    """Returns the fraction of the measured time in which workers of these stages do nothing."""
    ends = {step: end for own in stages for step, name, _, end in own if name == "update"}
    begin, end = ends[SKIPPED], ends[STEPS - 1]  # at the end, those that generate have nothing more to do
    idle = []
    for own in stages:
        busy = [(max(a, begin), min(b, end)) for _, name, a, b in own if name in names and b > begin and a < end]
        if busy:
            idle.append(1 - sum(b - a for a, b in busy) / (end - begin))
    return sum(idle) / len(idle)


def svg(cases: dict[str, list[list[Stage]]]) -> str:
    """Draws a lane per worker and a bar per stage, all cases on one scale of time."""
    width, left, row = 900, 150, 22
    spans = {
        name: (min(s[2] for w in case for s in w), max(s[3] for w in case for s in w)) for name, case in cases.items()
    }
    scale = (width - left - 10) / max(end - start for start, end in spans.values())
    parts, y = list[str](), 20
    for name, case in cases.items():
        parts.append(
            f'<text x="8" y="{y}" font-size="13" font-weight="600">{escape(name)}: {step_s(case):.2f} s a step</text>'
        )
        for rank, own in enumerate(case):
            top = y + 8 + row * rank
            label = f"rank {rank}: {', '.join(dict.fromkeys(s[1] for s in own))}"
            parts.append(f'<text x="8" y="{top + 14}" font-size="11" fill="#5b6675">{label}</text>')
            parts.append(f'<rect x="{left}" y="{top}" width="{width - left - 10}" height="{row - 4}" fill="#eef1f5"/>')
            for step, stage, start, end in own:
                x, w = left + (start - spans[name][0]) * scale, max(0.8, (end - start) * scale)
                shape = f'x="{x:.1f}" y="{top}" width="{w:.1f}" height="{row - 4}" fill="{COLORS[stage]}"'
                parts.append(f'<rect {shape} stroke="#ffffff"><title>{stage}, step {step}</title></rect>')
        y += row * len(case) + 40
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y}" font-family="sans-serif">'
    parts.insert(0, '<rect width="100%" height="100%" fill="#ffffff"/>')
    return "\n".join([head, *parts, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--svg", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "data.jsonl").write_text("".join(json.dumps({"prompt": str(i)}) + "\n" for i in range(64)))
        cases = {
            "equal stages, staleness 0": run(folder, "d0", EQUAL),
            "equal stages, staleness 1": run(folder, "d1", EQUAL, staleness=1),
            "heavy tail, staleness 0": run(folder, "tail", TAILED),
            f"heavy tail, in chunks of {CHUNK} prompts": run(folder, "chunks", TAILED, chunk=CHUNK),
            "heavy tail, staleness 1": run(folder, "tail1", TAILED, staleness=1),
            "heavy tail, staleness 1, partial rollouts": run(folder, "partial", TAILED, staleness=1, partial=True),
        }
    times = {case: step_s(stages) for case, stages in cases.items()}
    for case, seconds in times.items():
        print(f"{case}: {seconds:.3f} s a step")
    d0, d1, tail, chunks, tail_d1, partial = times.values()
    if args.svg:
        args.svg.write_text(svg(cases))
    result = {
        "speedup_d1": round(d0 / d1, 3),
        "speedup_streaming": round(tail / chunks, 3),
        "speedup_streaming_bound": round(streaming_bound(TAILED), 3),
        "speedup_partial": round(tail / partial, 3),
        "speedup_partial_over_d1": round(tail_d1 / partial, 3),
        "bubble_frac": round(bubble(cases["equal stages, staleness 1"], ("generate", "update")), 4),
        "bubble_frac_before": round(bubble(cases["equal stages, staleness 0"], ("generate", "update")), 4),
        "step_s": {case: round(seconds, 4) for case, seconds in times.items()},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
