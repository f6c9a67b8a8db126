"""The golden curves: every built-in flow for a few steps on a tiny model. `python tests/golden/curves.py` records them.

A change that means to leave the mathematics alone leaves them alone. One that does not records them anew, and its
message says why they moved.
"""

import json
import sys
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parent
STEPS = 4
ROWS = [
    {
        "prompt": f"{'so ' * (i % 4)}what is {i} + {i * i % 7}?",
        "response": str(i + i * i % 7),
        "chosen": str(i + i * i % 7),
        "rejected": "no" * (1 + i % 3),
    }
    for i in range(16)
]
REWARD = """
def even_digits(solution_str):
    return sum(c in "02468ace" for c in solution_str) / 8
"""
CONFIG: dict[str, Any] = {
    "data": {"files": "rows.jsonl", "batch": 4, "fields": ["prompt"]},
    "steps": STEPS,
    "model": {"arch": "qwen2", "hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2},
    "rollout": {"n": 4, "max_tokens": 8},
    "train": {"lr": 1.0e-3, "warmup": 2},
    "critic": {"lr": 1.0e-3},
    "reward": "reward.py:even_digits",
    "wait_limit_s": 60,
}
KL, SEVERAL = {"kl": 0.05}, {"mini_batches": 2}
FLOWS: dict[str, dict[str, Any]] = {
    "cispo": {"algo": SEVERAL},
    "cpgd": {"algo": SEVERAL},
    "dapo": {"algo": SEVERAL},
    "dpo": {"data": {"files": "rows.jsonl", "batch": 4, "fields": ["prompt", "chosen", "rejected"]}},
    "dr_grpo": {"algo": KL},
    "gpg": {},
    "grpo": {"algo": KL | SEVERAL | {"epochs": 2}},
    "gspo": {"algo": SEVERAL},
    "opo": {},
    "ppo": {"algo": SEVERAL | {"kl_in_reward": 0.05}},
    "reinforce_pp": {"algo": KL},
    "reinforce_pp_baseline": {},
    "remax": {},
    "reward_model": {"data": {"files": "rows.jsonl", "batch": 4, "fields": ["prompt", "chosen", "rejected"]}},
    "rloo": {},
    "sft": {"data": {"files": "rows.jsonl", "batch": 4, "fields": ["prompt", "response"]}},
}
CURVES = ("loss", "grad_norm", "entropy", "kl", "vf_loss")
ROLLOUT = ("reward/mean", "response_length/mean")


def config_of(flow: str, folder: Path) -> Path:
    """Writes the config of a flow, with its data and reward beside it."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (folder / "reward.py").write_text(REWARD)
    config = CONFIG | {"flow": flow, "run_dir": str(folder / flow)} | FLOWS[flow]
    if flow in ("dpo", "reward_model", "sft"):
        del config["reward"]
    path = folder / f"{flow}.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def curves_of(run: Path) -> dict[str, list[float]]:
    """Returns the curves of a run that are compared; they do not depend on the number of workers."""
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    # With dynamic sampling these are of all prompts that were drawn, whose number depends on dp.
    rollout = ROLLOUT if "sampling/rounds" not in steps[-1] else ()
    names = sorted(n for n in steps[-1] if n.rpartition("/")[2] in CURVES or n in rollout)
    return {name: [step[name] for step in steps] for name in names}


def golden(flow: str) -> dict[str, list[float]]:
    curves: dict[str, list[float]] = json.loads((FOLDER / f"{flow}.json").read_text())
    return curves


def _record() -> None:
    import subprocess
    import tempfile

    for flow in FLOWS:
        with tempfile.TemporaryDirectory() as name:
            path = config_of(flow, Path(name))
            command = [sys.executable, "-m", "distflow", "run", str(path), "--workers", "2"]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            rounded = {n: [float(f"{v:.7g}") for v in c] for n, c in curves_of(path.parent / flow).items()}
        lines = (f"  {json.dumps(name)}: {json.dumps(curve)}" for name, curve in rounded.items())
        (FOLDER / f"{flow}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
        print(f"{flow}: {', '.join(rounded)}")


if __name__ == "__main__":
    _record()
