"""Token weights: numbers by hand, a reference in loops, and the same loss and gradient however a step is split."""

from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from distflow.algo.aggregate import Counts, token_weights
from distflow.algo.losses import policy
from distflow.algo.options import Aggregation
from distflow.algo.tokens import Tokens
from distflow.errors import ConfigError

BUSY = settings(deadline=None)  # the first example waits for torch
MODES: tuple[Aggregation, ...] = get_args(Aggregation)
LENGTHS = st.lists(st.integers(0, 5), max_size=8)


def counts(lengths: list[int], horizon: int = 8) -> Counts:
    return Counts(sum(lengths), sum(n > 0 for n in lengths), horizon)


@pytest.mark.parametrize(
    ("mode", "want"),
    [
        ("token-mean", [1 / 10, 1 / 10, 1 / 10, 1 / 10, 1 / 10]),
        ("seq-mean-token-mean", [1 / 16, 1 / 16, 1 / 16, 1 / 16, 1 / 4]),
        ("seq-mean-token-sum", [1 / 4, 1 / 4, 1 / 4, 1 / 4, 1 / 4]),
        ("seq-mean-token-sum-norm", [1 / 32, 1 / 32, 1 / 32, 1 / 32, 1 / 32]),
    ],
)
def test_by_hand(mode: Aggregation, want: list[float]) -> None:
    # Three samples here, of a step with 10 tokens in 4 samples and a horizon of 8.
    got = token_weights(mode, torch.tensor([4, 0, 1]), Counts(tokens=10, samples=4, horizon=8))
    assert got.dtype == torch.float32
    assert got.tolist() == pytest.approx(want)


def reference(mode: Aggregation, rows: list[list[float]], horizon: int) -> float:
    rows = [row for row in rows if row]
    if not rows:
        return 0.0
    match mode:
        case "token-mean":
            return float(np.mean([x for row in rows for x in row]))
        case "seq-mean-token-mean":
            return float(np.mean([np.mean(row) for row in rows]))
        case "seq-mean-token-sum":
            return float(np.mean([np.sum(row) for row in rows]))
        case "seq-mean-token-sum-norm":
            return float(np.mean([np.sum(row) / horizon for row in rows]))


@BUSY
@given(st.lists(st.lists(st.floats(-5, 5), max_size=5), max_size=8), st.sampled_from(MODES), st.integers(5, 20))
def test_matches_the_reference(rows: list[list[float]], mode: Aggregation, horizon: int) -> None:
    lengths = [len(row) for row in rows]
    weights = token_weights(mode, torch.tensor(lengths, dtype=torch.int64), counts(lengths, horizon))
    losses = torch.tensor([x for row in rows for x in row])
    assert float((weights * losses).sum()) == pytest.approx(reference(mode, rows, horizon), rel=1e-5, abs=1e-5)


@BUSY
@given(LENGTHS, st.sampled_from(MODES), st.randoms(use_true_random=False))
def test_the_order_of_samples_does_not_matter(lengths: list[int], mode: Aggregation, random) -> None:
    order = list(range(len(lengths)))
    random.shuffle(order)

    def per_sample(order: list[int]) -> list[list[float]]:
        moved = [lengths[i] for i in order]
        weights = token_weights(mode, torch.tensor(moved, dtype=torch.int64), counts(lengths))
        return [w.tolist() for w in weights.split(moved)] if moved else []

    plain = per_sample(list(range(len(lengths))))
    assert per_sample(order) == [plain[i] for i in order]


@BUSY
@given(LENGTHS.filter(lambda n: sum(n) > 0))
def test_means_weigh_1_in_total(lengths: list[int]) -> None:
    for mode in ("token-mean", "seq-mean-token-mean"):
        weights = token_weights(mode, torch.tensor(lengths), counts(lengths))
        assert float(weights.sum()) == pytest.approx(1, rel=1e-5)


class Step:
    """The samples of a step and a little model: logprobs and entropy are smooth functions of `theta` [3]."""

    def __init__(self, lengths: list[int], seed: int) -> None:
        self.lengths, self.seed = lengths, seed
        g = torch.Generator().manual_seed(seed)
        n = sum(lengths)
        self.owner = [i for i, length in enumerate(lengths) for _ in range(length)]
        self.features, self.others = (torch.randn(n, 3, generator=g, dtype=torch.float64) for _ in range(2))
        self.old, self.ref = (torch.randn(n, generator=g, dtype=torch.float64) - 2 for _ in range(2))
        self.advantage = torch.randn(len(lengths), generator=g, dtype=torch.float64)
        self.theta = torch.randn(3, generator=g, dtype=torch.float64)

    def run(self, mode: Aggregation, micro_batches: list[list[int]]) -> tuple[float, Tensor]:
        """The loss, and its gradient accumulated over micro-batches of samples."""
        theta = self.theta.clone().requires_grad_()
        total = 0.0
        for samples in micro_batches:
            at = [t for i in samples for t, owner in enumerate(self.owner) if owner == i]
            tokens = Tokens(
                -(self.features[at] @ theta).square(),
                torch.tensor([self.lengths[i] for i in samples], dtype=torch.int64),
                {"old_logprobs": self.old[at], "ref_logprobs": self.ref[at]},
                {"advantage": self.advantage[samples]},
                (self.others[at] @ theta).sigmoid(),
            )
            loss = policy(tokens, kl=0.1, entropy=0.02)
            weighted = (loss.per_token * token_weights(mode, tokens.lengths, counts(self.lengths))).sum()
            weighted.backward()
            total += float(weighted.detach())
        return total, torch.zeros(3) if theta.grad is None else theta.grad


@settings(max_examples=80, deadline=None)
@given(LENGTHS.filter(len), st.integers(0, 2**32), st.sampled_from(MODES), st.data())
def test_any_split_gives_the_same_loss_and_gradient(
    lengths: list[int], seed: int, mode: Aggregation, data: st.DataObject
) -> None:
    step = Step(lengths, seed)
    n = len(lengths)
    order = data.draw(st.permutations(range(n)))
    at = data.draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
    split = [[i for i in order if at[i] == m] for m in range(4)]  # some may be empty
    loss, gradient = step.run(mode, [list(range(n))])
    split_loss, split_gradient = step.run(mode, split)
    assert split_loss == pytest.approx(loss, rel=1e-12, abs=1e-12)
    torch.testing.assert_close(split_gradient, gradient, rtol=1e-11, atol=1e-11, check_dtype=False)


@pytest.mark.parametrize("mode", MODES)
def test_no_tokens_weigh_nothing(mode: Aggregation) -> None:
    for lengths in ([], [0], [0, 0]):
        for whole in (Counts(0, 0, 0), Counts(7, 3, 8)):  # nothing in the step, or nothing here
            weights = token_weights(mode, torch.tensor(lengths, dtype=torch.int64), whole)
            assert weights.shape == (0,)
            assert float(weights.sum()) == 0
    assert token_weights(mode, torch.tensor([2, 0]), Counts(2, 1, 4)).isfinite().all()


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(ConfigError, match="loss aggregation 'token_mean'; did you mean 'token-mean'"):
        token_weights("token_mean", torch.tensor([1]), Counts(1, 1, 1))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"longest response allowed, which is 0; set rollout\.max_tokens"):
        token_weights("seq-mean-token-sum-norm", torch.tensor([1]), Counts(1, 1, 0))
