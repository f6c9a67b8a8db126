"""Masks of the policy term: rejected tokens, responses left behind, tokens with a low entropy."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from algo.test_losses import cases, flat, tokens_of
from distflow.algo.correction import Correction, Rejection
from distflow.algo.masks import off_policy_mask, top_value
from distflow.algo.options import RejectionKind
from distflow.errors import ConfigError

BUSY = settings(deadline=None, max_examples=60)
MEASURES = {"k1": lambda x: x, "k2": lambda x: x * x / 2, "k3": lambda x: math.exp(x) - 1 - x}
SPANS = {
    "mean": lambda d: math.fsum(d) / len(d),
    "sum": math.fsum,
    "max": lambda d: max(abs(x) for x in d),
}


@pytest.mark.parametrize("span", ["token", *SPANS])
@pytest.mark.parametrize("measure", MEASURES)
@BUSY
@given(case=cases(), threshold=st.sampled_from([1.1, 2.0, 5.0]))
def test_rejection_matches_the_reference(span: str, measure: str, case: dict[str, list], threshold: float) -> None:
    kind: RejectionKind = f"{span}-{measure}"  # type: ignore[assignment]
    want: list[float | None] = []
    for new, old in zip(case["new"], case["old"], strict=True):
        each = [MEASURES[measure](a - b) for a, b in zip(new, old, strict=True)]
        bound = math.log(threshold) if measure == "k1" else threshold
        for x in each:
            distance = abs(x if span == "token" else SPANS[span](each))
            want.append(None if abs(distance - bound) < 1e-9 else float(distance <= bound))  # either is right
    lengths = torch.tensor([len(r) for r in case["new"]], dtype=torch.int64)
    kept, metrics = Rejection(kind, threshold).weights(flat(case["new"]), flat(case["old"]), lengths)
    assert [k for k, w in zip(kept.tolist(), want, strict=True) if w is not None] == [w for w in want if w is not None]
    assert torch.equal(metrics["rollout/rejected_frac"], 1 - kept)


def test_nan_is_not_trusted() -> None:
    nan, one = torch.tensor([math.nan, -1.0]), torch.tensor([1, 1])
    for kind in ("token", "sequence", "mask-token", "mask-sequence", "icepop-token", "icepop-sequence"):
        weights, metrics = Correction(kind).weights(torch.tensor([-1.0, -1.0]), nan, one)
        assert weights.tolist() == [0, 1]
        assert metrics["rollout/corrected_frac"].tolist() == [1, 0]
    kinds: tuple[RejectionKind, ...] = ("token-k1", "max-k3")
    for rejection in kinds:
        assert Rejection(rejection, 2.0).weights(nan, nan.roll(0), one)[0].tolist() == [0, 1]


@BUSY
@given(case=cases(), threshold=st.sampled_from([0.0, 0.5]))
def test_responses_left_behind(case: dict[str, list], threshold: float) -> None:
    want = []
    for new, old, advantage in zip(case["new"], case["old"], case["advantage"], strict=True):
        kl = math.fsum(b - a for a, b in zip(new, old, strict=True)) / max(1, len(new))
        if abs(kl - threshold) < 1e-9:
            return  # either is right
        want += [0.0 if advantage < 0 and kl > threshold else 1.0] * len(new)
    assert off_policy_mask(tokens_of(case), threshold).tolist() == want


@BUSY
@given(st.lists(st.lists(st.floats(0, 12, width=32), max_size=9), max_size=4), st.sampled_from([0.01, 0.2, 0.5, 1.0]))
def test_the_highest_fraction_of_all_workers(parts: list[list[float]], fraction: float) -> None:
    """Every worker finds the same value, which is that of the sorted whole."""
    whole = sorted((x for part in parts for x in part), reverse=True)
    want = whole[max(1, round(fraction * len(whole))) - 1] if whole else -math.inf
    rounds: list[torch.Tensor] = []

    def record(counts: torch.Tensor) -> torch.Tensor:
        rounds.append(counts)
        return counts

    assert top_value(torch.tensor([x for part in parts for x in part]), fraction, record) == pytest.approx(want, abs=0)
    for part in parts:  # a worker that has a part of them, told the counts of all
        agreed = iter(rounds)
        assert top_value(torch.tensor(part), fraction, lambda _, agreed=agreed: next(agreed)) == want  # type: ignore[misc]


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(ConfigError, match="unknown rollout rejection 'mean-k4'"):
        Rejection("mean-k4", 2.0)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"mean-k1 has threshold = 0.5; it must be 1 or more"):
        Rejection("mean-k1", 0.5)
    with pytest.raises(ConfigError, match="mask_off_policy is -1"):
        off_policy_mask(tokens_of({"new": [], "old": [], "ref": [], "entropy": [], "advantage": []}), -1)
    with pytest.raises(ConfigError, match="fraction of tokens is 0"):
        top_value(torch.zeros(1), 0, lambda counts: counts)
