"""Defaults are a promise: of keys as the reference lists them, of constants as the papers have them."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from distflow.config.schema import (
    Config,
    CurriculumConfig,
    DataConfig,
    EnvironmentConfig,
    EvalConfig,
    LoraConfig,
    ModelConfig,
    RewardConfig,
    Section,
)
from distflow.flow import FlowFunction
from distflow.flow.importing import load
from distflow.flows import BUILT_IN

ROOT = Path(__file__).parents[2]
SECTIONS: dict[str, type[Section]] = {
    "": Config,
    "data.": DataConfig,
    "data.curriculum.": CurriculumConfig,
    "model.": ModelConfig,
    "reward.": RewardConfig,
    "environment.": EnvironmentConfig,
    "eval.": EvalConfig,
    "train.lora.": LoraConfig,
}
NOT_LITERAL = {  # where the default stands for something else, which the page says in words
    "environment.python": "that of the run",
    "rollout.partial": "none",
    "train.lora.targets": "all-linear",
}
SHARED = {  # of all flows that end with a policy update
    "aggregate": "token-mean",
    "aggregate_by": "sample",
    "kl": 0.0,
    "kl_estimator": "k3",
    "entropy": 0.0,
    "entropy_target": None,
    "entropy_step": 0.005,
    "entropy_max": 1.0,
    "recompute_old_logprobs": False,
    "rollout_correction": None,
    "correction_threshold": 2.0,
    "correction_lower": None,
    "kl_unbiased": False,
    "kl_reference": "reference",
    "rollout_rejection": None,
    "rejection_threshold": 2.0,
    "mask_truncated": False,
    "mask_off_policy": None,
    "top_entropy": 1.0,
    "mini_batches": 1,
    "epochs": 1,
}
PPO_CLIP = {"clip": 0.2, "dual_clip": 3.0}
OWN: dict[str, dict[str, Any]] = {
    "cispo": {"clip": 1.0, "clip_high": 0.2},
    "clip_cov": {**PPO_CLIP, "share": 2e-4, "low": 1.0, "high": 5.0},
    "cpgd": {"clip": 0.2, "drift": 0.001},
    "dcpo": {"clip": 0.16, "clip_high": 0.2, "dual_clip": 10.0, "aggregate": "seq-mean-token-mean"},
    "dapo": {
        **PPO_CLIP,
        "clip_high": 0.28,
        "max_gen_batches": 10,
        "overlong_limit": 0,
        "overlong_buffer": 0,
        "overlong_penalty_factor": 1.0,
    },
    "distill": {**PPO_CLIP, "by": "teacher", "task": 0.0, "scale": "std"},
    "dppo": {"clip": 0.2, "clip_high": None},
    "dr_grpo": {**PPO_CLIP, "aggregate": "seq-mean-token-sum-norm"},
    "gdpo": PPO_CLIP,
    "gkd": {"k": 64, "divergence": "reverse", "beta": 0.5, "samples": "own", "by": "teacher", "task": 0.0},
    "gmpo": {"clip": 0.4, "aggregate": "seq-mean-token-mean"},
    "gpg": {},
    "grpo": {**PPO_CLIP, "clip_high": None, "scale": "std"},
    "gspo": {"clip": 3e-4, "clip_high": 4e-4, "dual_clip": 3.0, "aggregate": "seq-mean-token-mean"},
    "kl_cov": {"share": 2e-4, "penalty": 1.0},
    "max_at_k": {**PPO_CLIP, "k": 4, "baseline": "without"},
    "opo": {"aggregate": "seq-mean-token-sum-norm"},
    "otb": PPO_CLIP,
    "ppo": {**PPO_CLIP, "gamma": 1.0, "lam": 0.95, "clip_value": 0.2, "kl_in_reward": 0.0},
    "rae": {**PPO_CLIP, "decay": 0.95},
    "reinforce_pp": {**PPO_CLIP, "gamma": 1.0, "kl_in_reward": 0.0},
    "reinforce_pp_baseline": {**PPO_CLIP, "kl_estimator": "k2"},
    "remax": {"aggregate": "seq-mean-token-sum-norm"},
    "rloo": {**PPO_CLIP, "aggregate": "seq-mean-token-sum"},
    "sapo": {"tau": 1.0, "tau_negative": 1.05},
    "vespo": {"power": 2.0, "decay": 3.0, "power_negative": 3.0, "decay_negative": 2.0},
}
WITHOUT_POLICY: dict[str, dict[str, Any]] = {
    "dpo": {"beta": 0.1, "label_smoothing": 0.0, "kind": "sigmoid", "mini_batches": 1, "epochs": 1},
    "evaluate": {"temperature": 0.0, "n": 1},
    "kto": {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0, "mini_batches": 1, "epochs": 1},
    "orpo": {"beta": 0.1, "mini_batches": 1, "epochs": 1},
    "reward_model": {"centre": 0.0, "mini_batches": 1, "epochs": 1},
    "sft": {"aggregate": "token-mean", "mini_batches": 1, "epochs": 1},
}


def defaults(section: type[Section], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, field in section.model_fields.items():
        if isinstance(field.default, Section):
            yield from defaults(type(field.default), f"{prefix}{name}.")
        elif not field.is_required():
            yield prefix + name, field.get_default(call_default_factory=True)


def listed() -> dict[str, str]:
    """Returns key → default, as the reference has them."""
    page = (ROOT / "docs" / "reference.md").read_text().partition("## Metrics")[0]
    return dict(re.findall(r"^\| `([\w.]+)` \|.*\| ([^|]*) \|$", page, re.M))


def test_the_reference_has_the_defaults_of_the_code() -> None:
    page, compared = listed(), 0
    for key, value in (pair for prefix, section in SECTIONS.items() for pair in defaults(section, prefix)):
        if key not in page or value is None:  # None: another key, or the flow, decides
            continue
        if isinstance(value, dict) or value == []:
            assert page[key] in ("–", "none"), key
        elif key in NOT_LITERAL:
            assert page[key] == NOT_LITERAL[key]
        elif isinstance(value, bool | int | float):
            assert float(yaml.safe_load(page[key])) == float(value), key
        else:
            assert page[key] == (f"({', '.join(map(str, value))})" if isinstance(value, tuple) else value), key
        compared += 1
    assert compared > 60


@pytest.mark.parametrize("flow", BUILT_IN)
def test_the_constants_of_an_algorithm(flow: str) -> None:
    function = load(BUILT_IN[flow], "flow", Path())
    assert isinstance(function, FlowFunction)
    expected = WITHOUT_POLICY[flow] if flow in WITHOUT_POLICY else SHARED | OWN[flow]
    assert function.constants == expected
