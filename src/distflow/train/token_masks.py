"""Fields of an update that mark tokens among those of the whole step, on all workers: by entropy, by covariance."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from distflow.algo.masks import covariance_mask, top_value
from distflow.batch.batch import Batch, Ragged
from distflow.batch.response_mask import ModelTokens
from distflow.train.packing import OLD, ROLLOUT
from distflow.train.update_spec import HIGH_COVARIANCE, CovarianceChoice
from distflow.util.arrays import Ints
from distflow.util.seeds import mix

POLICY_MASK = "policy_mask"  # 1 for the tokens that have a policy term
_BITS = 30  # of the noise of a token


def with_high_entropy(batch: Batch, fraction: float, add_up: Callable[[Tensor], Tensor]) -> Batch:
    """Leaves a policy term to the tokens whose `old_entropy` is among the highest `fraction`."""
    entropy: Ragged = batch["old_entropy"]
    lowest = top_value(ModelTokens.of(batch).select(entropy.joined()), fraction, add_up)
    return _with(batch, POLICY_MASK, Ragged.packed((entropy.joined() >= lowest).float(), entropy.lengths))


def with_covariance(batch: Batch, choice: CovarianceChoice, seed: int, add_up: Callable[[Tensor], Tensor]) -> Batch:
    """Marks tokens by the covariance of log-prob and advantage before the first update of the step."""
    model = ModelTokens.of(batch)
    logprobs: Ragged = batch[OLD if OLD in batch else ROLLOUT]
    advantage = batch["advantage"]
    if isinstance(advantage, Ragged):
        per_token = model.select(advantage.joined())
    else:
        per_token = advantage.repeat_interleave(torch.from_numpy(model.lengths))
    noise = model.select(_noise(seed, batch.ids, logprobs.lengths)) if choice.drawn else None
    chosen = covariance_mask(
        model.select(logprobs.joined()), per_token, choice.share, add_up, noise, choice.bounds
    ).float()
    if not choice.drawn:
        return _with(batch, HIGH_COVARIANCE, model.spread(chosen))
    return _with(batch, POLICY_MASK, model.spread(1 - chosen))


def _noise(seed: int, ids: Ints, lengths: Ints) -> Tensor:
    """Returns a number above 0 for each token, a function of seed, sample and place: [tokens] float32."""
    place = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    of_sample = mix(np.full(1, seed, np.int64).view(np.uint64) ^ mix(ids.astype(np.uint64)))
    words = mix(np.repeat(of_sample, lengths) ^ place.astype(np.uint64))
    # As the bits of floats they are in the same order.
    bits = (words >> np.uint64(64 - _BITS)).astype(np.int32) + 1
    return torch.from_numpy(bits).view(torch.float32)


def _with(batch: Batch, field: str, values: Ragged) -> Batch:
    if field in batch:  # of both
        values = Ragged.packed(values.joined() * batch[field].joined(), values.lengths)
    return Batch(batch.ids, batch.groups, {**batch.columns, field: values})
