"""The demo: a tiny vision-language model learns from a lazy teacher (SFT), then by trial and error (GRPO)."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

from distflow import evaluate

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RUNS = ROOT / "runs" / "seeing"
ACCURACY = "val/all/score"


def distflow(*args: str) -> None:
    subprocess.run([sys.executable, "-m", "distflow", *args], check=True, cwd=ROOT)


def main() -> None:
    start = time.monotonic()
    shutil.rmtree(RUNS, ignore_errors=True)
    subprocess.run([sys.executable, str(HERE / "data.py"), str(RUNS)], check=True)
    distflow("run", str(HERE / "warmup.yaml"))
    distflow("export", str(RUNS / "warmup"), str(RUNS / "model"))
    distflow("run", str(HERE / "grpo.yaml"))
    lines = map(json.loads, (RUNS / "grpo" / "metrics.jsonl").read_text().splitlines())
    accuracy = [m[ACCURACY] for m in lines if ACCURACY in m]
    blind = evaluate(HERE / "grpo.yaml", [f"eval.files={RUNS / 'blind.parquet'}"], checkpoint=RUNS / "grpo")
    print(f"right about held-out pictures: {accuracy[0]:.1%} before GRPO, {accuracy[-1]:.1%} after it")
    print(f"and with other pictures beside the same questions: {blind[ACCURACY]:.1%}")
    print(f"{time.monotonic() - start:.0f} s in all; the pictures: distflow show {(RUNS / 'grpo').relative_to(ROOT)}")


if __name__ == "__main__":
    main()
