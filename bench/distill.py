"""Distillation against RL on the demo's task, from the same start: steps to 90 % of a teacher's held-out accuracy.

`python bench/distill.py [--seeds 3] [--steps 64]`. The teacher is the demo's model after 150 steps of GRPO; students
begin after a part of its warm-up, from which GRPO does learn. `--tune` tries every learning rate of RATES, on a seed
that is in no table; LR has the one with which each of them was there first.
"""

import argparse
import json
import shutil
import statistics

from learn import ACCURACY, RUNS, TASK, distflow, read_metrics, warm_up

TEACHER, START, KNOWN = RUNS / "teacher", RUNS / "start", RUNS / "teacher.json"
GOAL = 0.9  # of the teacher's accuracy
EVERY = 4  # steps between two evaluations
WARM_UP = 30  # steps, of the demo's 70
RATES = (2.5e-4, 5.0e-4, 1.0e-3)
TUNING_SEED = 100
STUDENTS: dict[str, list[str]] = {
    "gkd": ["flow=gkd", "algo.k=16"],
    "distill": ["flow=distill"],
    "grpo": ["flow=grpo"],
}
LR = {"gkd": 5.0e-4, "distill": 5.0e-4, "grpo": 2.5e-4}


def make_teacher() -> float:
    run = RUNS / "teacher-run"
    shutil.rmtree(run, ignore_errors=True)
    shutil.rmtree(TEACHER, ignore_errors=True)
    distflow("run", str(TASK / "grpo.yaml"), "steps=150", f"run_dir={run}", "eval.every=50", "workers=1")
    distflow("export", str(run), str(TEACHER))
    return read_metrics(run / "metrics.jsonl")[ACCURACY][-1]


def make_start(steps: int) -> None:
    run = RUNS / "start-run"
    for folder in (run, START):
        shutil.rmtree(folder, ignore_errors=True)
    distflow("run", str(TASK / "warmup.yaml"), f"steps={steps}", f"run_dir={run}", "workers=1", "eval=null")
    distflow("export", str(run), str(START))


def train(kind: str, steps: int, seed: int, lr: float) -> list[float]:
    """Returns the held-out accuracy before the first step and after every fourth one."""
    run = RUNS / f"{kind}-{seed}-{lr}"
    shutil.rmtree(run, ignore_errors=True)
    teacher = [] if kind == "grpo" else [f"roles.teacher.model={TEACHER}"]
    where = [f"run_dir={run}", f"name={run.name}", f"eval.every={EVERY}", "workers=1"]
    start = [f"model={START}", f"steps={steps}", f"seed={seed}", f"train.lr={lr}", "train.schedule=constant"]
    distflow("run", str(TASK / "grpo.yaml"), *where, *start, *STUDENTS[kind], *teacher)
    return read_metrics(run / "metrics.jsonl")[ACCURACY]


def reached(accuracy: list[float], goal: float) -> int | None:
    """Returns the step after which the accuracy was first at the goal."""
    return next((EVERY * i for i, a in enumerate(accuracy) if a >= goal), None)


def shown(step: int | None, steps: int) -> str:
    return f"> {steps}" if step is None else str(step)


def tune(goal: float, steps: int) -> None:
    print(f"{'':10} {'lr':>8} {'steps to the goal':>18} {'after':>7}")
    for kind in STUDENTS:
        for lr in RATES:
            accuracy = train(kind, steps, TUNING_SEED, lr)
            print(f"{kind:10} {lr:8} {shown(reached(accuracy, goal), steps):>18} {accuracy[-1]:7.1%}", flush=True)


def compare(goal: float, steps: int, seeds: int) -> None:
    print(f"{'steps to the goal':18} {'lr':>8} " + " ".join(f"{f'seed {s}':>7}" for s in range(seeds)) + "   median")
    for kind in STUDENTS:
        found = [reached(train(kind, steps, seed, LR[kind]), goal) for seed in range(seeds)]
        median = statistics.median(steps + 1 if s is None else s for s in found)
        cells = " ".join(f"{shown(s, steps):>7}" for s in found)
        middle = shown(None if median > steps else round(median), steps)
        print(f"{kind:18} {LR[kind]:8} {cells} {middle:>8}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--warm-up", type=int, default=WARM_UP)
    parser.add_argument("--tune", action="store_true", help="try learning rates instead")
    parser.add_argument("--keep", action="store_true", help="reuse the warm-up and the teacher of an earlier run")
    args = parser.parse_args()
    if not (args.keep and KNOWN.exists()):
        warm_up()
        KNOWN.write_text(json.dumps(make_teacher()))
    make_start(args.warm_up)
    goal = GOAL * (best := json.loads(KNOWN.read_text()))
    print(f"the teacher has {best:.1%}; the goal is {goal:.1%}", flush=True)
    if args.tune:
        tune(goal, args.steps)
    else:
        compare(goal, args.steps, args.seeds)


if __name__ == "__main__":
    main()
