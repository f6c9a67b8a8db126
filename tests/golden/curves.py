"""The golden curves: every built-in flow for a few steps on a tiny model, and some with settings of their own.

`python tests/golden/curves.py [NAME…]` records them.

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
        "label": i % 3 > 0,
    }
    for i in range(16)
]
REWARD = """
def even_digits(solution_str):
    return sum(c in "02468ace" for c in solution_str) / 8


def short(solution_str):
    return 1 / (1 + len(solution_str))
"""
LETTERS = "abcdefghijklmnopqrstuvwxyz"  # as tokens that stop a response, they give responses different lengths
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
    "clip_cov": {"algo": SEVERAL | {"share": 0.1, "low": 0.05}},
    "cpgd": {"algo": SEVERAL},
    "dapo": {"algo": SEVERAL},
    "dcpo": {"algo": SEVERAL | {"clip": 1e-4, "clip_high": 1e-4}},
    "distill": {"algo": SEVERAL | {"by": "ema", "task": 0.5}, "train": {"lr": 1.0e-2, "ema": 0.9}},
    "dpo": {"data": {"files": "rows.jsonl", "batch": 4, "fields": ["prompt", "chosen", "rejected"]}},
    "dppo": {"algo": SEVERAL | {"clip": 1e-5}},
    "dr_grpo": {"algo": KL},
    "gdpo": {"reward": ["reward.py:even_digits", "reward.py:short"]},
    "gkd": {
        "algo": SEVERAL | {"by": "ema", "k": 16, "divergence": "jensen_shannon", "beta": 0.3, "task": 0.5},
        "train": {"lr": 1.0e-2, "ema": 0.9},
    },
    "gmpo": {"algo": SEVERAL | {"clip": 0.01}},
    "gpg": {},
    "grpo": {"algo": KL | SEVERAL | {"epochs": 2}},
    "gspo": {"algo": SEVERAL},
    "kl_cov": {"algo": SEVERAL | {"share": 0.1, "penalty": 5.0}},
    "kto": {"data": {"files": "rows.jsonl", "batch": 4, "fields": ["prompt", "response", "label"]}},
    "max_at_k": {"algo": {"k": 2}},
    "opo": {},
    "orpo": {"data": {"files": "rows.jsonl", "batch": 4, "fields": ["prompt", "chosen", "rejected"]}},
    "otb": {},
    "ppo": {"algo": SEVERAL | {"kl_in_reward": 0.05}},
    "rae": {"algo": {"decay": 0.5}},
    "reinforce_pp": {"algo": KL},
    "reinforce_pp_baseline": {},
    "remax": {},
    "reward_model": {"data": {"files": "rows.jsonl", "batch": 4, "fields": ["prompt", "chosen", "rejected"]}},
    "rloo": {},
    "sapo": {"algo": SEVERAL},
    "sft": {"data": {"files": "rows.jsonl", "batch": 4, "fields": ["prompt", "response"]}},
    "vespo": {"algo": SEVERAL},
}
_MASKED = {
    "mini_batches": 2,
    "mask_truncated": True,
    "mask_off_policy": 1.0e-4,
    "top_entropy": 0.5,
    "rollout_rejection": "max-k1",
    "rejection_threshold": 1.01,
    "kl": 0.2,
    "kl_unbiased": True,
    "kl_reference": "ema",
}
# Runs in which no setting that the mathematics depends on has its default.
TUNED: dict[str, dict[str, Any]] = {
    "grpo_tuned": {
        "flow": "grpo",
        "rollout": {
            "n": 4,
            "max_tokens": 8,
            "min_tokens": 2,
            "temperature": 0.7,
            "top_k": 200,
            "top_p": 0.95,
            "stop": list(LETTERS),
        },
        "train": {
            "lr": 2.0e-3,
            "warmup": 3,
            "schedule": "cosine",
            "betas": [0.5, 0.9],
            "eps": 1.0e-4,
            "weight_decay": 5.0,
            "clip_grad": 0.03,
        },
        "algo": {
            "mini_batches": 2,
            "epochs": 2,
            "scale": "none",
            "clip": 0.02,
            "clip_high": 0.05,
            "dual_clip": 1.02,
            "kl": 0.2,
            "kl_estimator": "k2",
            "entropy": 0.01,
            "aggregate": "seq-mean-token-sum-norm",
        },
    },
    "dapo_tuned": {
        "flow": "dapo",
        "rollout": {"n": 4, "max_tokens": 8, "temperature": 1.3},
        "train": {"lr": 5.0e-3, "schedule": "linear", "clip_grad": 0.3},
        "algo": {
            "epochs": 3,
            "clip": 0.1,
            "max_gen_batches": 2,
            "overlong_limit": 7,
            "overlong_buffer": 4,
            "overlong_penalty_factor": 0.5,
        },
    },
    "grpo_masked": {
        "flow": "grpo",
        "rollout": {"n": 4, "max_tokens": 16, "stop": list(LETTERS)},
        "train": {"lr": 2.0e-3, "ema": 0.5, "ema_every": 2},
        "algo": _MASKED,
    },
    "grpo_entropy": {
        "flow": "grpo",
        "algo": {
            "mini_batches": 2,
            "entropy": 0.05,
            "entropy_target": 5.52,
            "entropy_step": 0.02,
            "entropy_max": 0.08,
        },
        "train": {"lr": 1.0e-2},
    },
    "ppo_tuned": {
        "flow": "ppo",
        "rollout": {"n": 4, "max_tokens": 8, "temperature": 0.7, "stop": list(LETTERS)},
        "train": {"lr": 1.0e-3, "clip_grad": 0.2, "weight_decay": 2.0},
        "critic": {"lr": 3.0e-3, "warmup": 4, "betas": [0.5, 0.9], "weight_decay": 5.0, "clip_grad": 0.2},
        "algo": {
            "mini_batches": 2,
            "epochs": 2,
            "gamma": 0.9,
            "lam": 0.7,
            "clip_value": 0.05,
            "kl_in_reward": 0.2,
            "clip": 0.01,
            "recompute_old_logprobs": True,
            "aggregate": "seq-mean-token-sum",
        },
    },
}
CURVES = ("loss", "grad_norm", "entropy", "kl", "vf_loss")
TUNED_CURVES = ("entropy_weight", "clip_frac", "dual_clip_frac", "lr", "mismatch_kl", "clip_ratio")
ROLLOUT = ("reward/mean", "response_length/mean")


def config_of(flow: str, folder: Path) -> Path:
    """Writes the config of a flow, with its data and reward beside it."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (folder / "reward.py").write_text(REWARD)
    config = CONFIG | {"flow": flow, "run_dir": str(folder / flow)} | (FLOWS | TUNED)[flow]
    if flow in ("dpo", "kto", "orpo", "reward_model", "sft"):
        del config["reward"]
    path = folder / f"{flow}.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def curves_of(run: Path) -> dict[str, list[float]]:
    """Returns the curves of a run that are compared; they do not depend on the number of workers."""
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    # With dynamic sampling these are of all prompts that were drawn, whose number depends on dp.
    drawn = ("reward/mean", "response_length/") if "sampling/rounds" in steps[-1] else ()
    curves = (*CURVES, *TUNED_CURVES) if run.name in TUNED else CURVES
    names = sorted(n for n in steps[-1] if (n.rpartition("/")[2] in curves or n in ROLLOUT) and not n.startswith(drawn))
    return {name: [step[name] for step in steps] for name in names}


def golden(flow: str) -> dict[str, list[float]]:
    curves: dict[str, list[float]] = json.loads((FOLDER / f"{flow}.json").read_text())
    return curves


def _record() -> None:
    import subprocess
    import tempfile

    for flow in sys.argv[1:] or (*FLOWS, *TUNED):
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
