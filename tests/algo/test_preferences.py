"""Losses of pairs: the mean over pairs and its gradient, however the samples stand and however long they are."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from distflow.algo import losses
from distflow.algo.aggregate import Counts, token_weights
from distflow.algo.losses import Loss, dpo, orpo, preference
from distflow.algo.tokens import Tokens
from distflow.errors import ConfigError, DataError
from distflow.train.update_spec import find_loss

BUSY = settings(deadline=None)  # the first example waits for torch
NAMES = (-7, 0, 3, 2**40)


def test_kto_is_that_of_a_loop() -> None:
    draw = np.random.default_rng(3)
    new, ref = ([-draw.random(n) * 3 for n in (3, 1, 4)] for _ in range(2))
    labels, z, beta, weights = [1.0, -1.0, -1.0], 0.3, 0.2, {1.0: 0.7, -1.0: 1.3}
    flat = torch.tensor(np.concatenate(new)).requires_grad_()
    fields = {"desirable": torch.tensor(labels), "kl_baseline": torch.full((3,), z)}
    tokens = Tokens(flat, torch.tensor([3, 1, 4]), {"ref_logprobs": torch.tensor(np.concatenate(ref))}, fields)
    got = losses.kto(tokens, beta, desirable_weight=0.7, undesirable_weight=1.3)
    weighed = token_weights("seq-mean-token-sum", tokens.lengths, Counts(8, 3, 9)).double() * got.per_token
    weighed.sum().backward()
    assert flat.grad is not None
    total, slopes = 0.0, []
    for n, r, label in zip(new, ref, labels, strict=True):
        gain = 1 / (1 + math.exp(-beta * label * (math.fsum(n) - math.fsum(r) - z)))
        total += weights[label] * (1 - gain) / 3
        slopes += [-weights[label] * gain * (1 - gain) * beta * label / 3] * len(n)
    assert float(weighed.sum()) == pytest.approx(total, rel=1e-6)
    np.testing.assert_allclose(flat.grad.numpy(), slopes, rtol=1e-6)


def test_bad_constants_of_kto_are_refused() -> None:
    tokens = Tokens(torch.zeros(1), torch.tensor([1]))
    for constants, error in (
        ({"beta": 0.0}, "beta = 0.0; it must be above 0"),
        ({"desirable_weight": -1.0}, "0 or more"),
    ):
        with pytest.raises(ConfigError, match=error):
            losses.kto(tokens, **constants)


@dataclass
class Sample:
    new: list[float]
    ref: list[float]
    pair: int
    chosen: int


@st.composite
def cases(draw: st.DrawFn, limit: float = 3.0, shortest: int = 1) -> list[Sample]:
    """Pairs, their samples in any order."""
    samples = []
    for name in draw(st.lists(st.sampled_from(NAMES), unique=True)):
        for chosen in (1, -1):
            n = draw(st.integers(shortest, 4))
            new, ref = (draw(st.lists(st.floats(-limit, 0), min_size=n, max_size=n)) for _ in range(2))
            samples.append(Sample(new, ref, name, chosen))
    return draw(st.permutations(samples))


def tokens_of(case: list[Sample], dtype: torch.dtype = torch.float64) -> Tokens:
    def flat(rows: list[list[float]]) -> Tensor:
        return torch.tensor([x for row in rows for x in row], dtype=dtype)

    return Tokens(
        flat([s.new for s in case]).requires_grad_(),
        torch.tensor([len(s.new) for s in case], dtype=torch.int64),
        {"ref_logprobs": flat([s.ref for s in case])},
        {
            "pair": torch.tensor([s.pair for s in case], dtype=torch.int64),
            "preferred": torch.tensor([s.chosen for s in case], dtype=torch.int64),
        },
    )


def halves(case: list[Sample]) -> list[tuple[Sample, Sample]]:
    names = sorted({s.pair for s in case})
    return [tuple(next(s for s in case if (s.pair, s.chosen) == (n, c)) for c in (1, -1)) for n in names]  # type: ignore[misc]


def aggregated(loss: Loss, tokens: Tokens, samples: int) -> Tensor:
    """The loss of a step that has this many samples."""
    counts = Counts(len(tokens.logprobs), samples, 8)
    return (loss.per_token * token_weights("seq-mean-token-sum", tokens.lengths, counts).double()).sum()


def softplus(x: float) -> float:
    """−log sigmoid(−x)"""
    return max(x, 0) + math.log1p(math.exp(-abs(x)))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


BETA, SMOOTH = 0.3, 0.1


def by_dpo(case: list[Sample]) -> tuple[float, list[float]]:
    """The mean over pairs, and its gradient at each token."""
    margins = {
        better.pair: BETA
        * (math.fsum(better.new) - math.fsum(better.ref) - (math.fsum(worse.new) - math.fsum(worse.ref)))
        for better, worse in halves(case)
    }
    each = [(1 - SMOOTH) * softplus(-m) + SMOOTH * softplus(m) for m in margins.values()]
    slopes = []
    for s in case:
        m = margins[s.pair]
        slope = (-(1 - SMOOTH) * sigmoid(-m) + SMOOTH * sigmoid(m)) * BETA * s.chosen / len(margins)
        slopes += [slope] * len(s.new)
    return math.fsum(each) / max(1, len(each)), slopes


def by_preference(case: list[Sample]) -> tuple[float, list[float]]:
    margins = {better.pair: better.new[-1] - worse.new[-1] for better, worse in halves(case)}
    slopes = []
    for s in case:
        slopes += [0.0] * (len(s.new) - 1) + [-sigmoid(-margins[s.pair]) * s.chosen / len(margins)]
    return math.fsum(softplus(-m) for m in margins.values()) / max(1, len(margins)), slopes


def by_kind(kind: str) -> "Reference":
    """Each kind from its formula; the gradient by central differences."""

    def loss(case: list[Sample]) -> float:
        total = []
        for better, worse in halves(case):
            score = {}
            for s in (better, worse):
                x = math.fsum(s.new) - math.fsum(s.ref)
                score[s.chosen] = x / len(s.new) if kind in ("ipo", "sigmoid_norm") else x
            delta = score[1] - score[-1]
            m = BETA * delta
            match kind:
                case "ipo":
                    total.append((delta - 1 / (2 * BETA)) ** 2)
                case "hinge":
                    total.append(max(0.0, 1 - m))
                case "robust":
                    total.append(((1 - SMOOTH) * softplus(-m) - SMOOTH * softplus(m)) / (1 - 2 * SMOOTH))
                case "sigmoid_norm":
                    total.append(softplus(-m))
                case "orpo":
                    mean = {s.chosen: min(math.fsum(s.new) / len(s.new), -1e-6) for s in (better, worse)}
                    odds = {c: x - math.log(-math.expm1(x)) for c, x in mean.items()}
                    total.append(-mean[1] + BETA * softplus(odds[-1] - odds[1]))
                case "centred":
                    a, b = better.new[-1], worse.new[-1]
                    total.append(softplus(b - a) + 0.5 * (a + b) ** 2)
        return math.fsum(total) / max(1, len(total))

    def reference(case: list[Sample]) -> tuple[float, list[float]]:
        slopes, step = [], 1e-5
        for i, s in enumerate(case):
            for t in range(len(s.new)):
                ends = []
                for sign in (1, -1):
                    new = [*s.new]
                    new[t] += sign * step
                    ends.append(loss([*case[:i], Sample(new, s.ref, s.pair, s.chosen), *case[i + 1 :]]))
                slopes.append((ends[0] - ends[1]) / (2 * step))
        return loss(case), slopes

    return reference


def smooth_dpo(tokens: Tokens) -> Loss:
    return dpo(tokens, BETA, SMOOTH)


Reference = Callable[[list[Sample]], tuple[float, list[float]]]
BOTH: list[tuple[Callable[[Tokens], Loss], Reference]] = [(smooth_dpo, by_dpo), (preference, by_preference)]
IDS = ["dpo", "preference"]


def test_dpo_by_hand() -> None:
    # Pair 5: 1/2 · ((−1 + 3) − (−2 + 1)) = 1.5; pair 2: 1/2 · (0 − 4) = −2
    case = [
        Sample([-2.0], [-1.0], 5, -1),
        Sample([-1.0, 0.0], [-1.0, 0.0], 2, 1),
        Sample([-1.0, 0.0], [-3.0, 0.0], 5, 1),
        Sample([0.0], [-4.0], 2, -1),
    ]
    result = dpo(tokens_of(case), beta=0.5)
    five, two = math.log1p(math.exp(-1.5)), math.log1p(math.exp(2))
    assert result.per_token.tolist() == pytest.approx([five, two / 2, two / 2, five / 2, five / 2, two])
    assert result.metrics["actor/margin"].tolist() == [1.5, -2, -2, 1.5, 1.5, -2]
    assert result.metrics["actor/accuracy"].tolist() == [1, 0, 0, 1, 1, 0]
    smooth = dpo(tokens_of(case), beta=0.5, label_smoothing=0.25)
    assert smooth.per_token[0].item() == pytest.approx(0.75 * five + 0.25 * (five + 1.5))


def test_preference_by_hand() -> None:
    case = [Sample([9.0, 1.0], [0.0, 0.0], 1, 1), Sample([3.0], [0.0], 1, -1)]
    result = preference(tokens_of(case))
    loss = math.log1p(math.exp(2))
    assert result.per_token.tolist() == pytest.approx([loss / 2, loss / 2, loss])
    assert result.metrics["reward_model/margin"].tolist() == [-2, -2, -2]
    assert result.metrics["reward_model/accuracy"].tolist() == [0, 0, 0]


@pytest.mark.parametrize(("loss", "reference"), BOTH, ids=IDS)
@BUSY
@given(case=cases())
def test_the_mean_over_pairs_and_its_gradient(
    loss: Callable[[Tokens], Loss], reference: Reference, case: list[Sample]
) -> None:
    tokens = tokens_of(case)
    total = aggregated(loss(tokens), tokens, len(case))
    total.backward()
    want, slopes = reference(case)
    assert float(total.detach()) == pytest.approx(want, rel=1e-6, abs=1e-9)  # the weights are float32
    assert tokens.logprobs.grad is not None
    np.testing.assert_allclose(tokens.logprobs.grad.numpy(), slopes, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(("loss", "reference"), BOTH, ids=IDS)
@BUSY
@given(case=cases(), data=st.data())
def test_pairs_can_be_split_over_calls(
    loss: Callable[[Tokens], Loss], reference: Reference, case: list[Sample], data: st.DataObject
) -> None:
    at = {name: data.draw(st.integers(0, 2)) for name in NAMES}
    total = 0.0
    for call in range(3):
        tokens = tokens_of([s for s in case if at[s.pair] == call])
        total += float(aggregated(loss(tokens), tokens, len(case)).detach())
    assert total == pytest.approx(reference(case)[0], rel=1e-6, abs=1e-9)


@BUSY
@given(cases(), st.sampled_from([-2.0, 0.5]))
def test_a_shift_of_all_scores_changes_no_preference(case: list[Sample], shift: float) -> None:
    moved = [Sample([x + shift for x in s.new], s.ref, s.pair, s.chosen) for s in case]
    got, want = (preference(tokens_of(c)).per_token.detach().numpy() for c in (moved, case))
    np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9)
    # And at the reference, nothing is preferred yet.
    start = dpo(tokens_of([Sample(s.ref, s.ref, s.pair, s.chosen) for s in case]))
    assert (start.metrics["actor/margin"] == 0).all()


@BUSY
@given(cases(limit=1e5, shortest=0))
def test_always_finite(case: list[Sample]) -> None:
    for dtype in (torch.float32, torch.float64):
        for loss in (dpo, smooth_dpo, preference):
            if loss is preference and any(not s.new for s in case):
                continue
            tokens = tokens_of(case, dtype)
            result = loss(tokens)
            result.per_token.sum().backward()
            assert tokens.logprobs.grad is not None
            for values in (result.per_token, tokens.logprobs.grad, *result.metrics.values()):
                assert values.isfinite().all()
                assert values.shape == tokens.logprobs.shape
            assert not any(values.requires_grad for values in result.metrics.values())


def test_an_empty_response() -> None:
    case = [Sample([], [], 1, 1), Sample([-2.0], [-1.0], 1, -1)]
    result = dpo(tokens_of(case), beta=1.0)
    assert result.metrics["actor/margin"].tolist() == [1]  # the other one has become less likely
    with pytest.raises(DataError, match="without tokens has no score"):
        preference(tokens_of(case))


def test_entropy_is_logged_if_it_was_computed() -> None:
    case = [Sample([-1.0], [0.0], 1, 1), Sample([-2.0], [-1.0], 1, -1)]
    tokens = tokens_of(case)
    assert set(dpo(tokens).metrics) == {"actor/margin", "actor/accuracy"}
    more = Tokens(tokens.logprobs, tokens.lengths, tokens.per_token, tokens.per_sample, torch.tensor([0.5, 1.5]))
    assert dpo(more).metrics["actor/entropy"].tolist() == [0.5, 1.5]


def test_invalid_arguments_are_refused() -> None:
    def sample(chosen: int, pair: int = 4) -> Sample:
        return Sample([-1.0], [-1.0], pair, chosen)

    for loss in (dpo, preference):
        with pytest.raises(DataError, match="pair 4 has 0 responses marked as the other one"):
            loss(tokens_of([sample(1)]))
        with pytest.raises(DataError, match="pair 6 has 0 responses marked as the preferred one"):
            loss(tokens_of([sample(1), sample(-1), sample(-1, 6)]))
        with pytest.raises(DataError, match="pair 4 has 2 responses marked as the preferred one"):
            loss(tokens_of([sample(1), sample(-1), sample(1)]))
        with pytest.raises(DataError, match="field 'preferred' must be 1 for the preferred"):
            loss(tokens_of([sample(1), sample(0)]))
        ref = {"ref_logprobs": torch.zeros(1)}
        with pytest.raises(ConfigError, match="needs field 'pair'"):
            loss(Tokens(torch.zeros(1), torch.tensor([1]), ref))
        with pytest.raises(DataError, match="field 'pair' has a value per token"):
            loss(Tokens(torch.zeros(1), torch.tensor([1]), {**ref, "pair": torch.zeros(1)}))
    with pytest.raises(ConfigError, match="beta = 0"):
        dpo(tokens_of([]), beta=0)
    with pytest.raises(ConfigError, match=r"label_smoothing = 0\.5"):
        dpo(tokens_of([]), label_smoothing=0.5)


@pytest.mark.parametrize("name", ["dpo", "preference", "value"])
def test_a_flow_finds_them_by_name(name: str) -> None:
    assert find_loss(name, "here", Path()) is getattr(losses, name)


def test_no_samples() -> None:
    for loss in (dpo, preference):
        assert loss(tokens_of([])).per_token.shape == (0,)


KINDS: dict[str, Callable[[Tokens], Loss]] = {
    "ipo": lambda tokens: dpo(tokens, BETA, kind="ipo"),
    "hinge": lambda tokens: dpo(tokens, BETA, kind="hinge"),
    "robust": lambda tokens: dpo(tokens, BETA, SMOOTH, kind="robust"),
    "sigmoid_norm": lambda tokens: dpo(tokens, BETA, kind="sigmoid_norm"),
    "orpo": lambda tokens: orpo(tokens, BETA),
    "centred": lambda tokens: preference(tokens, centre=0.5),
}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=30, deadline=None)
@given(case=cases())
def test_each_kind_matches_its_formula(kind: str, case: list[Sample]) -> None:
    if kind == "orpo":  # its odds are bounded near probability 1
        case = [Sample([x - 0.01 for x in s.new], s.ref, s.pair, s.chosen) for s in case]
    tokens = tokens_of(case)
    total = aggregated(KINDS[kind](tokens), tokens, len(case))
    total.backward()
    want, slopes = by_kind(kind)(case)
    assert float(total.detach()) == pytest.approx(want, rel=1e-6, abs=1e-9)
    assert tokens.logprobs.grad is not None
    close = np.isclose(tokens.logprobs.grad.numpy(), slopes, rtol=1e-4, atol=1e-6)
    assert close.all() or kind == "hinge"  # which has a kink


def test_a_wanted_margin() -> None:
    case = [Sample([1.0], [0.0], 1, 1), Sample([3.0], [0.0], 1, -1)]
    tokens = tokens_of(case)
    wanted = {**tokens.per_sample, "wanted_margin": torch.tensor([0.5, 0.5])}
    more = preference(Tokens(tokens.logprobs, tokens.lengths, tokens.per_token, wanted))
    assert more.per_token.tolist() == pytest.approx([math.log1p(math.exp(2.5))] * 2)


def test_invalid_kinds_are_refused() -> None:
    with pytest.raises(ConfigError, match="the dpo loss has no kind 'ipoo'; did you mean 'ipo'"):
        dpo(tokens_of([]), kind="ipoo")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="kind 'hinge' has no label_smoothing"):
        dpo(tokens_of([]), label_smoothing=0.1, kind="hinge")
    with pytest.raises(ConfigError, match="beta = -1"):
        orpo(tokens_of([]), beta=-1)
    with pytest.raises(ConfigError, match="centre = -1"):
        preference(tokens_of([]), centre=-1)
