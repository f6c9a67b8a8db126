"""What a loss may return."""

import pytest
import torch

from distflow import Loss
from distflow.engine.train.trainer import _checked
from distflow.errors import ConfigError


def test_a_loss_returns_a_value_for_each_token() -> None:
    fine = Loss(torch.zeros(3))
    assert _checked(fine, 3) is fine
    with pytest.raises(ConfigError, match=r"returned \[\] values for 3 tokens; return one per token"):
        _checked(Loss(torch.tensor(1.0)), 3)
    with pytest.raises(ConfigError, match=r"returned a Tensor; return distflow.Loss"):
        _checked(torch.zeros(3), 3)
