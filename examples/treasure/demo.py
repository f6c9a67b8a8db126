"""The demo: a tiny model learns a game of several moves, from a confused teacher (SFT), then by playing (RL)."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import plotext

from distflow.observe.splits import HELD_OUT
from distflow.page.sample_index import SampleIndex

HERE = Path(__file__).parent
RUNS = HERE.parents[1] / "runs" / "treasure"
SUCCESS = "val/env/environment/found"


def distflow(*args: str) -> None:
    subprocess.run([sys.executable, "-m", "distflow", *args], check=True, cwd=HERE.parents[1])


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def curve(success: dict[int, float]) -> str:
    """Draws success over steps for a terminal."""
    plotext.clear_figure()
    plotext.plot_size(72, 12)
    plotext.title("treasures found, held-out boards")
    plotext.xlabel("step")
    plotext.ylim(0, 1)
    plotext.yticks([0, 0.5, 1], ["0%", "50%", "100%"])
    plotext.plot(list(success), list(success.values()), marker="braille")
    return str(plotext.uncolorize(plotext.build()))


def games(run: Path) -> dict[int, dict[str, Any]]:
    """Returns step → the first held-out game that was recorded at it."""
    index = SampleIndex(run)
    samples = [index.sample(*key) for key in index.recorded() if key[1] == HELD_OUT]
    first = min(s["id"] for s in samples if s)
    return {s["step"]: s["fields"] for s in samples if s and s["id"] == first}


def transcript(fields: dict[str, Any]) -> str:
    said = [(m["role"] == "user", m["content"].strip()) for m in fields["conversation"]]
    words = [text if told else f"[{text}]" for told, text in said]
    return f"{' '.join(words)}   (from {fields['start']} to {fields['treasure']})"


def main() -> None:
    start = time.monotonic()
    shutil.rmtree(RUNS, ignore_errors=True)
    subprocess.run([sys.executable, str(HERE / "game.py"), str(RUNS)], check=True)
    print("1. SFT: a model with random weights learns from somebody who mostly holds the compass upside down")
    distflow("run", str(HERE / "warmup.yaml"))
    distflow("export", str(RUNS / "warmup"), str(RUNS / "model"))
    print("2. REINFORCE++: it plays, and moves in the right direction are reinforced")
    distflow("run", str(HERE / "rl.yaml"))
    success = {m["step"]: m[SUCCESS] for m in read(RUNS / "rl" / "metrics.jsonl") if SUCCESS in m}
    before, *_, after = success.values()
    print(curve(success))
    print(f"treasures found on held-out boards: {before:.0%} before, {after:.0%} after")
    played = games(RUNS / "rl")
    for when in (min(played), max(played)):
        print(f"step {when}: {transcript(played[when])}")
    print(f"{RUNS / 'rl'}: metrics, samples, weights; {time.monotonic() - start:.0f} s in all")


if __name__ == "__main__":
    main()
