"""Programs a second that one reward process tests, beside a plain `python` that does the same without a sandbox.

    python bench/sandbox.py [--programs 200] [--rounds 5] [--before SRC]

`--before` is the `src` folder of another checkout, measured in turn with this one. The last line is one JSON object:
`per_s` and `vs_plain` by kind of test, the median round of each.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

KINDS = ("stdin", "asserts")
STDIN = "a, b = map(int, input().split())\nprint(a + b)\n"
CASES = [{"input": "1 2\n", "output": "3\n"}]
FUNCTION = "def add(a, b):\n    return a + b\n"
ASSERTS = ["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'", "assert add([1], [2]) == [1, 2]"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--measure", choices=["here", "plain"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        measure = sandboxed if args.measure == "here" else plain
        print(json.dumps({kind: measure(kind, args.programs) for kind in KINDS}))
        return
    src = Path(__file__).parents[1] / "src"
    candidates = {"before": args.before} if args.before else {}
    candidates |= {"per_s": src, "plain_per_s": None}
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in candidates}
    for i in range(args.rounds):
        for name, path in candidates.items():
            rates = run(path, args.programs)
            print(f"round {i} {name}: {', '.join(f'{kind} {rate:.1f}/s' for kind, rate in rates.items())}", flush=True)
            rounds[name].append(rates)
    medians = {name: {k: statistics.median(r[k] for r in rates) for k in KINDS} for name, rates in rounds.items()}
    report: dict[str, object] = {
        "programs": args.programs,
        "rounds": args.rounds,
        **{k: rounded(v) for k, v in medians.items()},
    }
    for other, key in (("plain_per_s", "vs_plain"), ("before", "vs_before")):
        if other in medians:
            report[key] = rounded({kind: medians["per_s"][kind] / medians[other][kind] for kind in KINDS})
    print(json.dumps(report))


def run(src: Path | None, programs: int) -> dict[str, float]:
    """Measures in a process of its own, which imports from `src`; without it, plain `python`."""
    command = [sys.executable, __file__, "--measure", "here" if src else "plain", "--programs", str(programs)]
    env = {**os.environ, "PYTHONPATH": str(src.absolute())} if src else dict(os.environ)
    done = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
    rates: dict[str, float] = json.loads(done.stdout)
    return rates


def sandboxed(kind: str, programs: int) -> float:
    from distflow.reward.code import unit_tests

    program, tests = (STDIN, CASES) if kind == "stdin" else (FUNCTION, ASSERTS)
    unit_tests("", program, tests)  # starts the jails
    start = time.perf_counter()
    for i in range(programs):
        score = unit_tests("", f"{program}# {i}\n", tests)["score"]
        assert score == 1.0, score
    return programs / (time.perf_counter() - start)


def plain(kind: str, programs: int) -> float:
    text, given = (STDIN, "1 2\n") if kind == "stdin" else (FUNCTION + "\n".join(ASSERTS), "")
    start = time.perf_counter()
    for i in range(programs):
        subprocess.run(
            [sys.executable, "-c", f"{text}\n# {i}\n"], input=given, text=True, check=True, capture_output=True
        )
    return programs / (time.perf_counter() - start)


def rounded(rates: dict[str, float]) -> dict[str, float]:
    return {kind: round(rate, 3) for kind, rate in rates.items()}


if __name__ == "__main__":
    main()
