"""The demo: a tiny model learns from a careless teacher (SFT), then by trial and error (GRPO). Two workers, minutes."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import plotext
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
RUNS = HERE.parents[1] / "runs" / "sorting"
ACCURACY = "val/all/score"


def distflow(*args: str) -> None:
    subprocess.run([sys.executable, "-m", "distflow", *args], check=True, cwd=HERE.parents[1])


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def curve(accuracy: dict[int, float]) -> str:
    """Draws accuracy over steps for a terminal."""
    plotext.clear_figure()
    plotext.plot_size(72, 12)
    plotext.title("correct answers, held-out")
    plotext.xlabel("step")
    plotext.ylim(0, 1)
    plotext.yticks([0, 0.5, 1], ["0%", "50%", "100%"])
    plotext.plot(list(accuracy), list(accuracy.values()), marker="braille")
    return str(plotext.uncolorize(plotext.build()))


def main() -> None:
    console = Console()
    start = time.time()
    shutil.rmtree(RUNS, ignore_errors=True)
    subprocess.run([sys.executable, str(HERE / "data.py"), str(RUNS)], check=True)
    console.rule("1. SFT: a model with random weights learns from a careless teacher")
    distflow("run", str(HERE / "warmup.yaml"))
    distflow("export", str(RUNS / "warmup"), str(RUNS / "model"))
    console.rule("2. GRPO: it tries, and correct answers are reinforced")
    distflow("run", str(HERE / "grpo.yaml"))

    accuracy = {m["step"] + 1: m[ACCURACY] for m in read(RUNS / "grpo" / "metrics.jsonl") if ACCURACY in m}
    before, *_, after = accuracy.values()
    console.rule("3. The result, on numbers it was never trained on")
    table = Table("", "before GRPO", "after", title="sort the digits of a number")
    table.add_row("correct answers, held-out", f"{before:.1%}", f"{after:.1%}", style="bold")
    samples = read(RUNS / "grpo" / "samples.jsonl")
    steps = [s["step"] for s in samples]
    first, last = ({s["prompt"]: s for s in samples if s["step"] == step} for step in (min(steps), max(steps)))
    for prompt in sorted(first)[:6]:
        responses = (f"{s['response']} {'✓' if s['score'] else '✗'}" for s in (first[prompt], last[prompt]))
        table.add_row(prompt.strip(), *responses)
    console.print(table)
    print(curve(accuracy))
    print(f"{RUNS / 'grpo'}: metrics, samples, weights; {time.time() - start:.0f} s in all")


if __name__ == "__main__":
    main()
