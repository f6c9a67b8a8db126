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

from distflow.observe.splits import HELD_OUT
from distflow.page.sample_index import SampleIndex

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
    start = time.monotonic()
    shutil.rmtree(RUNS, ignore_errors=True)
    subprocess.run([sys.executable, str(HERE / "data.py"), str(RUNS)], check=True)
    console.rule("1. SFT: a model with random weights learns from a careless teacher")
    distflow("run", str(HERE / "warmup.yaml"))
    distflow("export", str(RUNS / "warmup"), str(RUNS / "model"))
    console.rule("2. GRPO: it tries, and correct answers are reinforced")
    distflow("run", str(HERE / "grpo.yaml"))

    accuracy = {m["step"]: m[ACCURACY] for m in read(RUNS / "grpo" / "metrics.jsonl") if ACCURACY in m}
    before, *_, after = accuracy.values()
    console.rule("3. The result, on numbers it was never trained on")
    table = Table("", "before GRPO", "after", title="sort the digits of a number")
    table.add_row("correct answers, held-out", f"{before:.1%}", f"{after:.1%}", style="bold")
    index = SampleIndex(RUNS / "grpo")
    held_out = [index.sample(*key) for key in index.recorded() if key[1] == HELD_OUT]
    samples = {(s["step"], s["fields"]["prompt"]): s["fields"] for s in held_out if s}
    steps = [step for step, _ in samples]
    for prompt in sorted({prompt for _, prompt in samples})[:6]:
        shown = (samples[step, prompt] for step in (min(steps), max(steps)))
        responses = (f"{s['response']} {'✓' if s['score'] else '✗'}" for s in shown)
        table.add_row(prompt.strip(), *responses)
    console.print(table)
    print(curve(accuracy))
    print(f"{RUNS / 'grpo'}: metrics, samples, weights; {time.monotonic() - start:.0f} s in all")
    print(f"see it in a browser: .venv/bin/distflow show {(RUNS / 'grpo').relative_to(HERE.parents[1])}")


if __name__ == "__main__":
    main()
