"""Distillation against RL on the demo's task, from the same start: steps to 90 % of a teacher's held-out accuracy.

`python bench/distill.py [--seeds 3] [--steps 48]`. The teacher is the demo's model after 150 steps of GRPO; students
begin after 15 steps of its warm-up instead of 70. Some ten minutes on two cores.
"""

import argparse
import json
import shutil
import time

from learn import ACCURACY, RUNS, TASK, distflow, read_metrics, warm_up

TEACHER, START = RUNS / "teacher", RUNS / "start"
GOAL = 0.9  # of the teacher's accuracy
STUDENTS: dict[str, list[str]] = {
    "gkd": ["flow=gkd", "algo.k=16"],
    "distill": ["flow=distill"],
    "grpo": ["flow=grpo"],
}


def make_teacher() -> float:
    run = RUNS / "teacher-run"
    shutil.rmtree(run, ignore_errors=True)
    shutil.rmtree(TEACHER, ignore_errors=True)
    distflow("run", str(TASK / "grpo.yaml"), "steps=150", f"run_dir={run}", "eval.every=50", "workers=1")
    distflow("export", str(run), str(TEACHER))
    return read_metrics(run / "metrics.jsonl")[ACCURACY][-1]


def make_start() -> None:
    run = RUNS / "start-run"
    for folder in (run, START):
        shutil.rmtree(folder, ignore_errors=True)
    distflow("run", str(TASK / "warmup.yaml"), "steps=15", f"run_dir={run}", "workers=1", "eval=null")
    distflow("export", str(run), str(START))


def train(kind: str, steps: int, seed: int) -> tuple[list[float], float]:
    """Returns the held-out accuracy before the first step and after every eighth one, and the seconds of a step."""
    run = RUNS / f"{kind.replace(' ', '-')}-{seed}"
    shutil.rmtree(run, ignore_errors=True)
    teacher = [] if kind == "grpo" else [f"roles.teacher.model={TEACHER}"]
    where = [f"run_dir={run}", f"name={run.name}", "eval.every=8", "workers=1"]
    start = [f"model={START}", f"steps={steps}", f"seed={seed}"]
    distflow("run", str(TASK / "grpo.yaml"), *where, *start, *STUDENTS[kind], *teacher, "train.schedule=constant")
    metrics = read_metrics(run / "metrics.jsonl")
    return metrics[ACCURACY], sum(metrics["timing_s/step"]) / steps


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--keep", action="store_true", help="reuse the warm-up and the teacher of an earlier run")
    args = parser.parse_args()
    known = RUNS / "teacher.json"
    if not (args.keep and known.exists()):
        warm_up()
        known.write_text(json.dumps(make_teacher()))
    make_start()
    goal = GOAL * (best := json.loads(known.read_text()))
    print(f"the teacher has {best:.1%}; the goal is {goal:.1%}")
    print(f"{'':12} {'seed':>4} {'before':>7} {'steps to the goal':>18} {'after':>7} {'s a step':>9}")
    for seed in range(args.seeds):
        for kind in STUDENTS:
            began = time.monotonic()
            accuracy, seconds = train(kind, args.steps, seed)
            reached = next((8 * i for i, a in enumerate(accuracy) if a >= goal), None)
            print(
                f"{kind:12} {seed:4} {accuracy[0]:7.1%} {reached if reached is not None else f'> {args.steps}':>18}"
                f" {accuracy[-1]:7.1%} {seconds:9.2f}  {time.monotonic() - began:.0f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
