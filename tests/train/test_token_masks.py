"""Tokens that an update treats apart: chosen among those of all workers, whatever worker has them."""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from distflow.batch.batch import Batch, Ragged
from distflow.train.token_masks import POLICY_MASK, with_covariance, with_high_entropy
from distflow.train.update_spec import HIGH_COVARIANCE, CovarianceChoice

HIGHEST = CovarianceChoice(0.2)
DRAWN = CovarianceChoice(0.2, (0.05, 2.0), drawn=True)


def some(per_token: bool = False, masked: bool = False) -> Batch:
    noise = torch.Generator().manual_seed(3)
    lengths = [5, 0, 9, 3, 7, 8]
    tokens = [torch.arange(n) for n in lengths]
    logprobs = [-torch.rand(n, generator=noise) * 4 for n in lengths]
    advantage = torch.randn(6, generator=noise)
    columns = {
        "response_tokens": Ragged.of(tokens),
        "rollout_logprobs": Ragged.of(logprobs),
        "advantage": Ragged.of([a.repeat(n) for a, n in zip(advantage, lengths, strict=True)])
        if per_token
        else advantage,
    }
    if masked:
        columns["response_mask"] = Ragged.of([(torch.arange(n) % 3 > 0).long() for n in lengths])
    ids = np.arange(40, 46)
    return Batch(ids, ids // 2, columns)


def alone(counts: Tensor) -> Tensor:
    return counts


class MissingError(Exception):
    """A worker needs a sum over both that is not known yet."""


def on_two_workers(change: Callable[[Batch, Callable[[Tensor], Tensor]], Batch], batch: Batch, field: str) -> Tensor:
    """Runs both workers in turns, each until it needs a sum that it was not told yet."""
    parts, sums = [batch.select(np.array(p)) for p in ([0, 2, 5], [1, 3, 4])], list[Tensor]()

    while True:
        asked: list[Tensor] = []
        done: dict[int, Tensor] = {}
        for part in parts:
            told = iter(sums)

            def add_up(values: Tensor, told: Iterator[Tensor] = told, asked: list[Tensor] = asked) -> Tensor:
                total = next(told, None)
                if total is None:
                    asked.append(values)
                    raise MissingError
                return total

            try:
                column = change(part, add_up)[field]
                done |= dict(zip(part.ids.tolist(), column, strict=True))
            except MissingError:
                pass
        if not asked:
            return torch.cat([done[i] for i in batch.ids.tolist()])
        assert len(asked) == 2
        sums.append(asked[0] + asked[1])


def test_the_workers_choose_the_same_tokens_together() -> None:
    for choice, field in ((HIGHEST, HIGH_COVARIANCE), (DRAWN, POLICY_MASK)):
        for batch in (some(), some(per_token=True), some(masked=True)):
            want = with_covariance(batch, choice, 7, alone)[field].joined()
            got = on_two_workers(lambda part, add_up, c=choice: with_covariance(part, c, 7, add_up), batch, field)  # type: ignore[misc]
            assert torch.equal(got, want)
            assert 0 < want.sum() < len(want)


def test_the_highest_covariances_are_marked() -> None:
    batch = some(masked=True)
    mask = batch["response_mask"].joined().bool()
    x = batch["rollout_logprobs"].joined().double()[mask].numpy()
    a = np.repeat(batch["advantage"].double().numpy(), batch["response_tokens"].lengths)[mask.numpy()]
    covariance = (x - x.mean()) * (a - a.mean())
    want = np.zeros(len(x))
    want[np.argsort(-covariance)[: round(0.2 * len(x))]] = 1
    marked = with_covariance(batch, HIGHEST, 7, alone)[HIGH_COVARIANCE].joined()
    assert marked[mask].tolist() == want.tolist()
    assert not marked[~mask].any()


def test_tokens_are_drawn_within_the_bounds_by_the_seed() -> None:
    batch = some()
    left_out = [1 - with_covariance(batch, DRAWN, seed, alone)[POLICY_MASK].joined() for seed in (7, 7, 8)]
    assert torch.equal(left_out[0], left_out[1])
    assert not torch.equal(left_out[0], left_out[2])
    x = batch["rollout_logprobs"].joined().double()
    a = batch["advantage"].double().repeat_interleave(torch.from_numpy(batch["response_tokens"].lengths))
    covariance = (x - x.mean()) * (a - a.mean())
    within = (covariance > 0.05) & (covariance < 2)
    for drawn in left_out:
        assert int(drawn.sum()) == round(0.2 * len(x))
        assert not drawn[~within].any()
    none = CovarianceChoice(0.2, (99.0, 100.0), drawn=True)
    assert bool((with_covariance(batch, none, 7, alone)[POLICY_MASK].joined() == 1).all())


def test_both_masks_are_multiplied() -> None:
    batch = some()
    lengths = batch["response_tokens"].lengths
    batch.columns["old_entropy"] = Ragged.of([torch.linspace(0, 1, n) for n in lengths])
    high = with_high_entropy(batch, 0.5, alone)
    both = with_covariance(high, DRAWN, 7, alone)[POLICY_MASK].joined()
    assert torch.equal(both, high[POLICY_MASK].joined() * with_covariance(batch, DRAWN, 7, alone)[POLICY_MASK].joined())
