"""What a loss may return, and over how many ranks a model is sharded."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from distflow import Loss
from distflow.algo.tokens import Tokens
from distflow.batch.batch import Batch, Ragged
from distflow.config.schema import CriticConfig, TrainConfig
from distflow.errors import ConfigError
from distflow.plan import Layout
from distflow.roles.context import shard_degree
from distflow.train.trainer import _checked, _policy_weights, _prepared
from distflow.train.update_spec import UpdateSpec, update_spec


def test_a_loss_returns_a_value_for_each_token() -> None:
    fine = Loss(torch.zeros(3))
    assert _checked(fine, 3) is fine
    with pytest.raises(ConfigError, match=r"returned \[\] values for 3 tokens; return one per token"):
        _checked(Loss(torch.tensor(1.0)), 3)
    with pytest.raises(ConfigError, match=r"returned a Tensor; return distflow.Loss"):
        _checked(torch.zeros(3), 3)


def test_the_shard_degree_divides_dp() -> None:
    layout = Layout(tuple(range(6)), 6)
    assert shard_degree(TrainConfig(), layout, "actor") == 6
    assert shard_degree(TrainConfig(shard_degree=2), layout, "actor") == 2
    with pytest.raises(ConfigError) as error:
        shard_degree(TrainConfig(shard_degree=4), layout, "actor.update")
    assert str(error.value) == (
        "train.shard_degree: 4 does not divide dp 6 of actor.update; use one of 1, 2, 3, 6, or leave it out"
    )
    with pytest.raises(ConfigError, match=r"^critic\.shard_degree: 12 does not"):
        shard_degree(CriticConfig(shard_degree=12), layout, "critic")


def spec(**params: Any) -> UpdateSpec:
    role = SimpleNamespace(name="actor", base=Path(), rollout=SimpleNamespace(max_tokens=8), steps=1)
    return update_spec(role, loss="policy", **params)  # type: ignore[arg-type]


def test_truncated_responses_and_the_average_as_a_reference() -> None:
    tokens = Ragged.of([torch.tensor([i, i]) for i in range(3)])
    finished = torch.tensor([True, False, True])
    batch = Batch(np.arange(3), np.zeros(3, np.int64), {"response_tokens": tokens, "finished": finished})
    assert _prepared(batch, spec()).ids.tolist() == [0, 1, 2]
    assert _prepared(batch, spec(mask_truncated=True)).ids.tolist() == [0, 2]
    average = Batch(batch.ids, batch.groups, {**batch.columns, "ema_logprobs": tokens})
    assert _prepared(average, spec())["ref_logprobs"] is tokens


def test_the_factors_of_policy_terms_are_multiplied() -> None:
    new, old = torch.tensor([-1.0, -1.0, -3.0, -1.0]), torch.tensor([-1.0, -1.0, -1.0, -1.0])
    fields = {"old_logprobs": old, "rollout_logprobs": torch.tensor([-1.0, -1.5, -1.0, -9.0])}
    fields |= {"policy_mask": torch.tensor([0.0, 1.0, 1.0, 1.0])}
    advantage = {"advantage": torch.tensor([1.0, -1.0, 1.0])}
    tokens = Tokens(new, torch.tensor([2, 1, 1]), fields, advantage)
    masks = {"mask_off_policy": 1.0, "rollout_correction": "token", "rollout_rejection": "token-k2"}
    factor, metrics = _policy_weights(tokens, spec(**masks))
    assert factor is not None
    # The first by its entropy; the second by the ratio e^0.5; the third is left behind; the fourth rejected.
    assert factor.tolist() == pytest.approx([0, np.exp(0.5), 0, 0])
    assert metrics["actor/off_policy_frac"].tolist() == [0, 0, 1, 0]
    assert metrics["rollout/rejected_frac"].tolist() == [0, 0, 0, 1]
    plain = Tokens(new, tokens.lengths, {"rollout_logprobs": old}, advantage)
    assert _policy_weights(plain, spec()) == (None, {})
