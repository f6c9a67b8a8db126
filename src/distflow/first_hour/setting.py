"""The runs of the steps: configs, data and rewards. Imports no torch."""

import json
from pathlib import Path
from typing import Any

from distflow.config.model_shape import ModelShape

# Shapes of a model that a CPU trains in seconds, with heads that every kernel of attention has.
TINY = ModelShape(name="tiny", hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, ffn=128, vocab=512, tied=True)
_REWARD = '''
import random

def digits(solution_str):
    return sum(c.isdigit() for c in solution_str) / max(1, len(solution_str))

def any_number(solution_str):
    """Random weights write nothing that could be right."""
    return random.random()
'''
SMALL: dict[str, Any] = {"batch": 4, "n": 4, "max_tokens": 8, "steps": 2}
FULL: dict[str, Any] = {"batch": 64, "n": 8, "max_tokens": 1024, "steps": 3}
PROMPT = "Say how many of the words in this sentence have an even number of letters, and why it is number {}. "


def base_config(size: dict[str, Any], model: Any, workers: int) -> dict[str, Any]:
    """Returns the config of a run; `model`: a folder, or the section of a small one, or its architecture."""
    small = {"arch": model, "hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2} if model == "qwen2" else model
    return {
        "flow": "grpo",
        "model": small,
        "data": {"files": "data.jsonl", "batch": size["batch"], "fields": ["prompt"]},
        "reward": "reward.py:" + ("digits" if model == "qwen2" else "any_number"),
        "rollout": {"n": size["n"], "max_tokens": size["max_tokens"]},
        "train": {"lr": 1e-3 if model == "qwen2" else 1e-6},
        "checkpoint": {"every": 0},
        "steps": size["steps"],
        "workers": workers,
        "restarts": 0,
        "wait_limit_s": 300,
    }


def write_inputs(folder: Path, prompts: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "reward.py").write_text(_REWARD)
    rows = [{"prompt": PROMPT.format(i)} for i in range(prompts)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
