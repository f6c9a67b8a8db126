"""Peak memory of a worker: with the reference model on and off, and as the model is sharded over more workers.

    python bench/memory.py

A Qwen2 of 110M parameters (420 MiB in float32; training it takes four times that), GRPO on a few short samples per
worker, so that weights, gradients and optimiser are what counts. Start-up (Python, PyTorch) is measured apart.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from transformers import AutoModelForCausalLM, Qwen2Config

from distflow.model.tokenizer import train_tokenizer


def make(folder: Path) -> int:
    tokenizer = train_tokenizer(iter(["0123456789+="]), 258)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=12,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "rows.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) + "\n" for i in range(64))
    )
    (folder / "reward.py").write_text("def score(completions, **_):\n    return [float(len(c)) for c in completions]\n")
    return sum(p.numel() for p in model.parameters())


def peak(folder: Path, workers: int, kl: float, steps: int = 2) -> float:
    """MiB of the largest worker."""
    config = {
        "flow": "grpo",
        "model": "model",
        "data": {"files": "rows.jsonl", "batch": workers},
        "reward": "reward.py:score",
        "rollout": {"n": 2, "max_tokens": 4},
        "algo": {"kl": kl},
        "steps": steps,
        "workers": workers,
        "run_dir": str(folder / "run"),
    }
    (folder / "memory.yaml").write_text(json.dumps(config))
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, "-m", "distflow", "run", str(folder / "memory.yaml")],
        check=True,
        env=env,
        stdout=subprocess.DEVNULL,
    )
    rows = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    return max(float(r["perf/peak_mib"]) for r in rows)


def bare() -> float:
    """MiB of a process that has imported everything. Not by `getrusage`, which starts from what its parent has."""
    code = "import distflow.roles.policy; print(open('/proc/self/status').read())"
    status = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    return next(int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmHWM:"))


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parameters = make(folder)
        imports = bare()
        print(f"{parameters / 1e6:.0f}M parameters, {parameters * 4 / 2**20:.0f} MiB; imports alone {imports:.0f} MiB")
        print("workers (dp)   reference off   reference on   peak MiB of the largest worker")
        found = {}
        for workers in (1, 2, 4):
            off, on = (peak(folder, workers, kl) for kl in (0.0, 0.04))
            found[workers] = {"off": round(off), "on": round(on)}
            print(f"{workers:12}   {off:13.0f}   {on:12.0f}", flush=True)
    print(json.dumps({"parameters": parameters, "imports_mib": round(imports), "peak_mib": found}))


if __name__ == "__main__":
    main()
