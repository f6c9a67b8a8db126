"""Where an engine gives its memory back, and where it stays awake."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distflow.config.loading import make_config
from distflow.roles.policy import Policy
from distflow.run.program import Program
from distflow.run.role_objects import only_generates

APART = ("placement.ranks={r: 0-1, t: 2-3}", "placement.default={ranks: t}")


def ranks_that_only_generate(*overrides: str) -> list[int]:
    raw: dict[str, Any] = {"flow": "grpo", "data": {"files": "data.jsonl", "fields": ["prompt"]}, "workers": 4}
    raw |= {"model": {"arch": "qwen2"}, "reward": "reward.py:score", "algo": {"kl": 0.1}}
    config = make_config(raw, overrides, Path(), "the config", "test")
    plans = [Program(config).plan(4)]
    return [rank for rank in range(4) if only_generates(plans, rank)]


def test_ranks_that_do_nothing_else_with_a_model_keep_the_memory() -> None:
    assert ranks_that_only_generate() == []
    generate = "actor.generate: {ranks: r}"
    assert ranks_that_only_generate(*APART, f"placement.nodes={{{generate}}}") == [0, 1]
    both = f"placement.nodes={{{generate}, reference.logprobs: {{ranks: r}}}}"
    assert ranks_that_only_generate(*APART, both) == []


@pytest.mark.parametrize("alone", [True, False])
def test_an_engine_sleeps_only_where_others_need_its_memory(alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[bool] = []
    emptied: list[torch.device] = []
    monkeypatch.setattr("distflow.roles.policy.release_cached", emptied.append)
    engine = SimpleNamespace(release_memory=lambda weights: released.append(weights))
    policy: Any = Policy.__new__(Policy)
    policy.role = SimpleNamespace(only_generates=alone, device=torch.device("cpu"))
    policy.engine, policy.lent, policy.transfer = engine, False, object()
    policy.base_specs, policy.keeps_weights = (), False
    policy.release_engine_memory()
    assert released == ([] if alone else [True])
    assert emptied == ([] if alone else [torch.device("cpu")])  # also what torch keeps of it
