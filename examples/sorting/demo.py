"""The demo: a tiny model learns from a careless teacher, then by trying (GRPO). Two workers, a few minutes."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from distflow.observe.curve import read, svg, terminal

HERE = Path(__file__).parent
RUNS = HERE.parents[1] / "runs" / "sorting"
ACCURACY = "val/all/score"


def distflow(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "distflow", *words], check=True, cwd=HERE.parents[1])


def held_out(run: str) -> list[tuple[int, float]]:
    return read(RUNS / run / "metrics.jsonl", ACCURACY)[ACCURACY]


def samples(run: str) -> dict[int, dict[str, dict[str, object]]]:
    """Step → prompt → what was answered."""
    found: dict[int, dict[str, dict[str, object]]] = {}
    for line in (RUNS / run / "samples.jsonl").read_text().splitlines():
        row = json.loads(line)
        found.setdefault(row["step"], {})[row["prompt"]] = row
    return found


def main() -> None:
    out = Console()
    began = time.time()
    shutil.rmtree(RUNS, ignore_errors=True)
    subprocess.run([sys.executable, str(HERE / "data.py"), str(RUNS)], check=True)
    out.rule("1. warm-up: a random model sees the examples of a careless teacher")
    distflow("run", str(HERE / "warmup.yaml"))
    distflow("export", str(RUNS / "warmup"), str(RUNS / "model"))
    out.rule("2. GRPO: it tries, and what was right is reinforced")
    distflow("run", str(HERE / "grpo.yaml"))

    curve = held_out("grpo")
    out.rule("3. the result, on numbers it was never trained on")
    table = Table("", "before GRPO", "after", title="sort the digits of a number")
    table.add_row("right answers, held-out", f"{curve[0][1]:.1%}", f"{curve[-1][1]:.1%}", style="bold")
    said = samples("grpo")
    first, last = said[min(said)], said[max(said)]
    for prompt in sorted(first)[:6]:
        before, after = (f"{row['response']} {'✓' if row['score'] else '✗'}" for row in (first[prompt], last[prompt]))
        table.add_row(prompt.strip(), before, after)
    out.print(table)
    print(terminal({"right answers, held-out": curve}, percent=True))
    picture = RUNS / "curve.svg"
    trained = read(RUNS / "grpo" / "metrics.jsonl", "reward/mean")["reward/mean"]
    series = {"held-out, greedy": curve, "training, sampled": trained}
    picture.write_text(
        svg("GRPO learns to sort digits", series, y="right answers", headline="held-out, greedy", percent=True)
    )
    print(f"\n{picture}: the curve; {RUNS / 'grpo'}: metrics, samples, weights; {time.time() - began:.0f} s in all")


if __name__ == "__main__":
    main()
