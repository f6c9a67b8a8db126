"""Memory of a long run: what each worker holds after 200 steps, and at the end.

`python bench/soak.py [--steps 2000]`: GRPO with a tiny model, checkpoints and evaluation included, on two workers.
One JSON object is the last line.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

EARLY = 200


def resident(run: Path, workers: int) -> list[float]:
    """Returns the resident memory of each worker in MiB."""
    mib = []
    for rank in range(workers):
        pid = json.loads((run / "workers" / f"{rank}.heartbeat").read_text())["pid"]
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        mib.append(pages * os.sysconf("SC_PAGE_SIZE") / 2**20)
    return mib


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, run = Path(name), Path(name) / "run"
        rows = [{"prompt": f"{'so ' * (i % 5)}what is {i} + {i * i % 17}?"} for i in range(64)]
        (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "reward.py").write_text(
            "def score(completions, **_):\n    return [len(c) % 3 for c in completions]\n"
        )
        config = {
            "flow": "grpo",
            "model": {"arch": "qwen2", "hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2},
            "data": {"files": "data.jsonl", "batch": 4},
            "reward": "reward.py:score",
            "rollout": {"n": 4, "max_tokens": 8},
            "algo": {"kl": 0.01},
            "eval": {"files": "data.jsonl", "limit": 8, "every": 100},
            "steps": args.steps,
            "workers": args.workers,
            "run_dir": str(run),
        }
        (folder / "run.yaml").write_text(json.dumps(config))
        command = [sys.executable, "-m", "distflow", "run", str(folder / "run.yaml")]
        began = time.monotonic()
        process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
        memory: dict[int, list[float]] = {}
        log, step = run / "metrics.jsonl", 0
        while process.poll() is None:
            time.sleep(0.1)
            if log.exists() and log.stat().st_size:
                with open(log, "rb") as file:
                    file.seek(max(0, log.stat().st_size - 20_000))
                    lines = [line for line in file.read().split(b"\n")[:-1] if line.startswith(b'{"step"')]
                step = int(json.loads(lines[-1])["step"]) if lines else 0
                if step >= EARLY:
                    try:
                        mib = resident(run, args.workers)
                    except (OSError, ValueError):
                        continue
                    if all(mib):  # a worker that has just ended holds nothing
                        memory[step] = mib
        if process.returncode:
            raise SystemExit(process.returncode)
    first, last = memory[min(memory)], memory[max(memory)]
    for at, mib in ((min(memory), first), (max(memory), last)):
        print(f"step {at}: " + ", ".join(f"{m:.1f} MiB" for m in mib))
    growth = max(b / a - 1 for a, b in zip(first, last, strict=True))
    result = {"steps": args.steps, "early": first, "late": last, "growth": growth, "s": round(time.monotonic() - began)}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
