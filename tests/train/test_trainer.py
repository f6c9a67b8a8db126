"""What a loss may return, and over how many ranks a model is sharded."""

import pytest
import torch

from distflow import Loss
from distflow.config.schema import CriticConfig, TrainConfig
from distflow.errors import ConfigError
from distflow.plan import Layout
from distflow.roles.context import shard_degree
from distflow.train.trainer import _checked


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
