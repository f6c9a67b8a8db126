"""Divergences from a teacher over its likeliest tokens: loops in float64, bounds, and what a missing field says."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.algo.distillation import divergence
from distflow.algo.losses import gkd, policy
from distflow.algo.tokens import MissingFieldError, Tokens, TopLogprobs
from distflow.errors import ConfigError

KINDS = ("forward", "reverse", "jensen_shannon")
LOGITS = st.lists(st.floats(-4, 4), min_size=6, max_size=6)


def by_loop(kind: str, p: list[float], q: list[float], beta: float) -> float:
    """The divergence of a student q from a teacher p, both whole distributions."""

    def kl(a: list[float], b: list[float]) -> float:
        return math.fsum(x * (math.log(x) - math.log(y)) for x, y in zip(a, b, strict=True))

    if kind == "forward":
        return kl(p, q)
    if kind == "reverse":
        return kl(q, p)
    mixture = [beta * x + (1 - beta) * y for x, y in zip(p, q, strict=True)]
    return beta * kl(p, mixture) + (1 - beta) * kl(q, mixture)


def softmax(logits: list[float]) -> list[float]:
    total = math.fsum(map(math.exp, logits))
    return [math.exp(x) / total for x in logits]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(LOGITS, LOGITS, st.integers(1, 5), st.sampled_from([0.1, 0.5, 0.8]))
def test_it_is_that_of_the_likeliest_tokens_and_one_for_the_rest(
    kind: Any, teacher: list[float], student: list[float], k: int, beta: float
) -> None:
    p, logits = softmax(teacher), torch.tensor([student], dtype=torch.float64, requires_grad=True)
    best = sorted(range(6), key=lambda i: -p[i])[:k]
    theirs = torch.tensor([[math.log(p[i]) for i in best]], dtype=torch.float64)
    got = divergence(kind, logits.log_softmax(-1)[:, best], theirs, beta)
    got.sum().backward()

    def reference(logits: list[float]) -> float:
        q = softmax(logits)
        merged = ([*(x[i] for i in best), 1 - math.fsum(x[i] for i in best)] for x in (p, q))
        return by_loop(kind, next(merged), next(merged), beta)

    assert float(got) == pytest.approx(reference(student), rel=1e-6, abs=1e-9)
    assert -1e-12 <= float(got) <= by_loop(kind, p, softmax(student), beta) + 1e-9  # a lower bound
    step = 1e-5
    for i in range(6):
        up, down = ([x + s * (j == i) for j, x in enumerate(student)] for s in (step, -step))
        assert logits.grad is not None
        assert float(logits.grad[0, i]) == pytest.approx((reference(up) - reference(down)) / (2 * step), abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_of_the_whole_vocabulary_it_is_exact_in_float32(kind: Any) -> None:
    noise = torch.Generator().manual_seed(1)
    theirs, ours = (torch.randn(50, 40, generator=noise).log_softmax(-1) for _ in range(2))
    got = divergence(kind, ours, theirs, 0.3)
    for i in range(50):
        p, q = (x[i].double().exp().tolist() for x in (theirs, ours))
        assert float(got[i]) == pytest.approx(by_loop(kind, p, q, 0.3), rel=1e-4, abs=1e-5)


def test_the_loss_adds_that_of_the_task() -> None:
    noise = np.random.default_rng(0)
    logprobs = torch.tensor(-noise.random(5), requires_grad=True)
    top = TopLogprobs(*(torch.tensor(np.log(noise.random((5, 3)) / 3)) for _ in range(2)))
    fields = {"advantage": torch.tensor([1.0, -2.0]), "old_logprobs": torch.zeros(2)}
    tokens = Tokens(logprobs, torch.tensor([2, 3]), per_sample=fields, top=top)
    alone, both = gkd(tokens, "forward"), gkd(tokens, "forward", task=0.5)
    torch.testing.assert_close(alone.per_token, divergence("forward", top.student, top.teacher))
    torch.testing.assert_close(both.per_token, alone.per_token + 0.5 * policy(tokens).per_token)
    assert {"distill/divergence", "actor/ratio"} <= both.metrics.keys()


def test_what_is_wrong_is_named() -> None:
    x = torch.full((1, 2), -1.0)
    with pytest.raises(ConfigError, match="unknown divergence 'revers'; did you mean 'reverse'"):
        divergence("revers", x, x)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"has beta = 1; it must be between 0 and 1"):
        divergence("jensen_shannon", x, x, 1)
    with pytest.raises(MissingFieldError, match="needs field 'teacher_top_logprobs'"):
        gkd(Tokens(x[0], torch.tensor([2])))
