"""Tokens are drawn from the softmax, with noise that is a function of seed, sample and position alone."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

from distflow.device.sizes import CPU
from distflow.errors import ConfigError
from distflow.rollout import sampling
from distflow.rollout.engine import SamplingParams
from distflow.rollout.sampling import gumbel_sample, noise_keys, sample

DRAWS = 6000
LOGITS = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5, -2.0, 1.5, -0.5])
PLAIN = SamplingParams(max_tokens=10)


def surprise(tokens: Tensor, p: Tensor) -> float:
    """Chi-square of draws against probabilities, in standard deviations from what it should be."""
    counts = torch.bincount(tokens, minlength=len(p)).double()
    wanted = p.double() * len(tokens)
    freedom = len(p) - 1
    return float((((counts - wanted) ** 2 / wanted).sum() - freedom) / math.sqrt(2 * freedom))


def draw(logits: Tensor, seed: int, samples: np.ndarray, positions: np.ndarray) -> Tensor:
    """Draws once from the same logits for each (sample, position)."""
    return gumbel_sample(logits.expand(len(samples), -1), noise_keys(seed, samples, positions))[0]


def along(what: str, seed: int, first: int = 0) -> tuple[int, np.ndarray, np.ndarray]:
    """Many draws that differ in the sample, in the position, or in both."""
    n, still = first + np.arange(DRAWS), np.full(DRAWS, 5)
    return seed, *{"samples": (n, still), "positions": (still, n), "both": (n // 60, n % 60)}[what]


@pytest.mark.parametrize("what", ["samples", "positions", "both"])
@pytest.mark.parametrize("seed", [0, 1, 2, -1, 1 << 62])
def test_draws_are_from_the_softmax(what: str, seed: int) -> None:
    assert abs(surprise(draw(LOGITS, *along(what, seed)), LOGITS.softmax(0))) < 4.5


def test_draws_over_seeds_are_from_the_softmax() -> None:
    noise = np.concatenate([noise_keys(seed, np.array([3]), np.array([4])) for seed in range(DRAWS)])
    assert abs(surprise(gumbel_sample(LOGITS.expand(DRAWS, -1), noise)[0], LOGITS.softmax(0))) < 4.5


def test_no_token_of_a_large_vocabulary_is_favoured() -> None:
    flat, step = torch.zeros(700), np.arange(30_000)
    assert abs(surprise(draw(flat, 3, step // 100, step % 100), flat.softmax(0))) < 4.5


@pytest.mark.parametrize("apart", ["seeds", "samples", "positions"])
@pytest.mark.parametrize("by", [1, 2, 64, 1 << 20])
def test_neighbouring_draws_are_independent(apart: str, by: int) -> None:
    flat, n = torch.zeros(4), np.arange(DRAWS)
    seed, samples, positions = 5, n // 60, n % 60
    one = draw(flat, seed, samples, positions)
    other = draw(
        flat,
        seed + by * (apart == "seeds"),
        samples + by * (apart == "samples"),
        positions + by * (apart == "positions"),
    )
    assert abs(surprise(4 * one + other, torch.full((16,), 1 / 16))) < 4.5


def test_every_bit_of_a_key_changes_the_draw() -> None:
    logits, noise = torch.zeros(50, 300), noise_keys(0, np.arange(50), np.arange(50))
    before, _ = gumbel_sample(logits, noise)
    for bit in range(64):
        other, _ = gumbel_sample(logits, noise ^ np.array(1 << bit, np.uint64).view(np.int64))
        assert (other == before).sum() <= 3  # one in 300 by chance


def test_the_statistic_detects_a_wrong_distribution() -> None:
    tokens = draw(LOGITS, *along("both", 0))
    assert surprise(tokens, (1.2 * LOGITS).softmax(0)) > 10


def test_a_token_without_probability_is_never_drawn() -> None:
    """Neither where a token is 1000 nats behind nor where it is cut away: among millions of noise values, none is
    infinite."""
    logits = torch.full((512, 1 << 15), -1000.0)
    logits[:, 1::2] = -math.inf
    logits[:, 6] = 0.0
    for seed in range(3):
        assert (gumbel_sample(logits, noise_keys(seed, np.arange(512), np.zeros(512, np.int64)))[0] == 6).all()


@settings(max_examples=30, deadline=None)
@given(st.integers(-(2**63), 2**63 - 1), st.lists(st.tuples(st.integers(0, 2**62), st.integers(0, 2**31))), st.data())
def test_a_draw_depends_on_seed_sample_and_position_only(
    seed: int, where: list[tuple[int, int]], data: st.DataObject
) -> None:
    where.append((7, 7))
    at = np.array(where, np.int64)
    logits = torch.randn(len(at), 50, generator=torch.Generator().manual_seed(0))
    tokens, logprobs = sample(logits, PLAIN, seed, at[:, 0], at[:, 1])
    some = np.array(data.draw(st.lists(st.integers(0, len(at) - 1), min_size=1)))
    again, their_logprobs = sample(logits[some], PLAIN, seed, at[some, 0], at[some, 1])
    assert torch.equal(again, tokens[some])
    assert torch.equal(their_logprobs, logprobs[some])


def test_the_block_size_does_not_change_the_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, n = torch.randn(100, 30), np.arange(100)
    whole, logprobs = gumbel_sample(logits, noise_keys(0, n, n))
    assert torch.allclose(logprobs, logits.log_softmax(-1)[n, whole])
    for block in (1, 31, 64, 1000):
        monkeypatch.setattr(sampling, "sizes_of", lambda device, block=block: replace(CPU, sampled_logits=block))
        tokens, same = gumbel_sample(logits, noise_keys(0, n, n))
        assert torch.equal(tokens, whole)
        assert torch.equal(same, logprobs)


def kept(logits: list[float], top_k: int, top_p: float, min_p: float = 0.0) -> set[int]:
    """Those that may be drawn, by the book: the k likeliest, those of them with enough probability beside the first,
    and of these the fewest that have mass top_p."""
    order = sorted(range(len(logits)), key=lambda i: -logits[i])[: top_k or None]
    order = [i for i in order if math.exp(logits[i] - max(logits)) >= min_p]
    odds = [math.exp(logits[i] - max(logits)) for i in order]
    before = [sum(odds[:n]) / sum(odds) for n in range(len(odds))]
    return {i for i, mass in zip(order, before, strict=True) if mass < top_p or top_p == 1}


DISTINCT = st.lists(st.integers(-60, 60), min_size=1, max_size=12, unique=True).map(lambda v: [x / 10 for x in v])


@settings(max_examples=150, deadline=None)
@given(logits=DISTINCT, top_k=st.integers(0, 14), top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.999)))
@example(logits=[0.0, 5.0, 1.0], top_k=1, top_p=1.0)
@example(logits=[0.0, 5.0, 1.0], top_k=0, top_p=1e-6)
def test_top_k_and_top_p_keep_the_right_tokens(logits: list[float], top_k: int, top_p: float) -> None:
    want = kept(logits, top_k, top_p)
    assume(want == kept(logits, top_k, top_p - 1e-5) == kept(logits, top_k, top_p + 1e-5))  # rounding does not decide
    params = SamplingParams(max_tokens=1, top_k=top_k, top_p=top_p)
    cut = sampling._truncate(torch.tensor([logits]), params)[0]
    assert set(torch.isfinite(cut).nonzero()[:, 0].tolist()) == want
    assert all(cut[i] == torch.tensor(logits[i]) for i in want)


@pytest.mark.parametrize("min_p", [0.015, 0.1, 0.4, 1.0])
def test_min_p_keeps_the_right_tokens(min_p: float) -> None:
    for top_k, top_p in ((0, 1.0), (3, 1.0), (0, 0.8)):
        params = SamplingParams(max_tokens=1, top_k=top_k, top_p=top_p, min_p=min_p)
        left = torch.isfinite(sampling._truncate(LOGITS[None], params)[0]).nonzero()[:, 0].tolist()
        assert set(left) == kept(LOGITS.tolist(), top_k, top_p, min_p)


def test_a_repetition_penalty_is_that_of_transformers() -> None:
    logits, seen = torch.stack([LOGITS, -LOGITS, LOGITS]), [{0, 3, 5}, {3, 7}, set[int]()]
    for penalty in (1.4, 0.7):
        ours = sampling._penalized(logits, penalty, seen)
        theirs = RepetitionPenaltyLogitsProcessor(penalty)
        for row, tokens, alone in zip(ours, seen, logits, strict=True):
            want = theirs(torch.tensor([sorted(tokens)], dtype=torch.int64), alone[None].clone())[0]
            assert torch.allclose(row, want, rtol=1e-6)


def test_a_penalty_makes_repetition_rarer_and_log_probs_are_the_models() -> None:
    params = SamplingParams(max_tokens=1, repetition_penalty=3.0)
    seen = [{3}] * DRAWS
    tokens, logprobs = sample(LOGITS.expand(DRAWS, -1), params, *along("both", 4), seen)
    changed = LOGITS.clone()
    changed[3] /= 3
    assert abs(surprise(tokens, changed.softmax(0))) < 4.5
    assert torch.allclose(logprobs.double(), LOGITS.double().log_softmax(0)[tokens], atol=1e-5)
    with pytest.raises(ConfigError, match=r"rollout.repetition_penalty: this engine does not say"):
        sample(LOGITS[None], params, 0, np.array([0]), np.array([0]))


def test_each_row_is_truncated_by_itself() -> None:
    logits = torch.stack([LOGITS, LOGITS.flip(0), 3 * LOGITS])
    params = SamplingParams(max_tokens=1, top_k=4, top_p=0.8)
    cut = sampling._truncate(logits, params)
    for row, alone in zip(cut, logits, strict=True):
        assert torch.equal(row, sampling._truncate(alone[None], params)[0])


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=1, temperature=0.5),
        SamplingParams(max_tokens=1, temperature=3.0),
        SamplingParams(max_tokens=1, top_k=3),
        SamplingParams(max_tokens=1, top_p=0.8),
        SamplingParams(max_tokens=1, top_k=5, top_p=0.7, temperature=1.5),
        SamplingParams(max_tokens=1, min_tokens=1 << 40, stop=frozenset({3, 0})),
    ],
    ids=["cold", "hot", "top-k", "top-p", "all of them", "no stop yet"],
)
def test_draws_are_from_the_truncated_distribution_and_log_probs_from_the_full_one(params: SamplingParams) -> None:
    tokens, logprobs = sample(LOGITS.expand(DRAWS, -1), params, *along("both", 4))
    scaled = LOGITS.double() / params.temperature
    may = kept(scaled.tolist(), params.top_k, params.top_p) - (params.stop if params.min_tokens else frozenset())
    assert len(may) > 1
    assert set(tokens.tolist()) == may
    left = sorted(may)
    place = torch.full((len(LOGITS),), -1)
    place[left] = torch.arange(len(left))
    assert abs(surprise(place[tokens], scaled[left].softmax(0))) < 4.5
    assert torch.allclose(logprobs.double(), scaled.log_softmax(0)[tokens], atol=1e-5)


def test_temperature_zero_takes_the_likeliest_token() -> None:
    logits = torch.randn(20, 30)
    tokens, logprobs = sample(logits, SamplingParams(max_tokens=1, temperature=0.0), 0, np.arange(20), np.arange(20))
    assert torch.equal(tokens, logits.argmax(-1))
    assert torch.allclose(logprobs, logits.log_softmax(-1).amax(-1), atol=1e-5)


def test_stop_tokens_are_held_back_until_min_tokens() -> None:
    """Positions are counted from 0: with min_tokens 2 a response has two others before it may end."""
    logits = torch.zeros(4, 5)
    logits[:, 2] = 50.0
    params = SamplingParams(max_tokens=9, min_tokens=2, stop=frozenset({2}))
    for temperature in (0.0, 1.0):
        cold = SamplingParams(max_tokens=9, min_tokens=2, stop=params.stop, temperature=temperature)
        tokens, logprobs = sample(logits, cold, 0, np.arange(4), np.arange(4))
        assert [t == 2 for t in tokens.tolist()] == [False, False, True, True]
        assert torch.allclose(logprobs, logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0])
    assert (logits[:, 2] == 50).all()  # what was given is left as it was


def test_bfloat16_logits_are_sampled_in_float32() -> None:
    logits = torch.randn(50, 40).bfloat16()
    tokens, logprobs = sample(logits, PLAIN, 0, np.arange(50), np.arange(50))
    same, theirs = sample(logits.float(), PLAIN, 0, np.arange(50), np.arange(50))
    assert logprobs.dtype == torch.float32
    assert torch.equal(tokens, same)
    assert torch.equal(logprobs, theirs)
