"""Losses of preference pairs: of two responses to a prompt, one is preferred.

Both are among the tokens, and two fields per sample find them: `pair`, an integer they share, and `preferred`, 1 for
the preferred response and −1 for the other. Each carries the loss of the pair, evenly over its tokens, so that with
seq-mean-token-sum the loss of the step is the mean over pairs. (An empty response carries nothing: its pair then
weighs half.)
"""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from distflow.algo.options import Positive, Smoothing
from distflow.algo.tokens import Loss, Tokens
from distflow.errors import ConfigError, DataError


def dpo(tokens: Tokens, beta: Positive = 0.1, label_smoothing: Smoothing = 0.0) -> Loss:
    """Direct preference optimisation (arXiv 2305.18290). Reads `pair`, `preferred` and `ref_logprobs`.

    The margin of a pair is beta × (log-ratio of the policy to the reference for the preferred response, less the
    log-ratio for the other). `label_smoothing` is the assumed share of pairs whose label is wrong.
    """
    if not beta > 0:
        raise ConfigError(f"the dpo loss has beta = {beta}; it must be above 0")
    if not 0 <= label_smoothing < 0.5:
        raise ConfigError(f"the dpo loss has label_smoothing = {label_smoothing}; it must be 0 or more, and below 0.5")
    margin, pair = _margins(tokens, beta * tokens.sum_per_sample(tokens.logprobs - tokens["ref_logprobs"]))
    per_pair = -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)
    loss = _pair_loss(tokens, per_pair, margin, pair, "actor")
    if tokens.entropy is None:
        return loss
    return Loss(loss.per_token, {**loss.metrics, "actor/entropy": tokens.entropy.detach()})


def preference(tokens: Tokens) -> Loss:
    """The Bradley–Terry loss of a reward model, whose score is the value at the last token of a response.

    Reads `pair` and `preferred`.
    """
    if not bool((tokens.lengths > 0).all()):
        raise DataError("a response without tokens has no score; remove its pair from the data")
    margin, pair = _margins(tokens, tokens.values[tokens.lengths.cumsum(0) - 1])
    return _pair_loss(tokens, -logsigmoid(margin), margin, pair, "reward_model")


def _margins(tokens: Tokens, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the score of the preferred response less the other's [pairs], and each sample's pair [samples]."""
    names, preferred = _per_sample(tokens, "pair"), _per_sample(tokens, "preferred")
    if not bool(((preferred == 1) | (preferred == -1)).all()):
        raise DataError("field 'preferred' must be 1 for the preferred response of a pair and -1 for the other")
    ids, pair = torch.unique(names, return_inverse=True)
    for sign, which in ((1, "preferred"), (-1, "other")):
        count = torch.bincount(pair[preferred == sign], minlength=len(ids))
        if not bool((count == 1).all()):
            first = int((count != 1).nonzero()[0])
            raise DataError(
                f"pair {int(ids[first])} has {int(count[first])} responses marked as the {which} one in this"
                " micro-batch; it must have one of each"
            )
    return scores.new_zeros(len(ids)).index_add(0, pair, scores * preferred.to(scores.dtype)), pair


def _pair_loss(tokens: Tokens, per_pair: Tensor, margin: Tensor, pair: Tensor, name: str) -> Loss:
    """Divides the loss of each pair [pairs] over the tokens of its responses."""
    per_token = tokens.expand(per_pair[pair] / tokens.lengths.clamp(min=1))
    margin = tokens.expand(margin.detach()[pair])
    return Loss(per_token, {f"{name}/margin": margin, f"{name}/accuracy": (margin > 0).to(margin.dtype)})


def _per_sample(tokens: Tokens, name: str) -> Tensor:
    if name in tokens.per_token:
        raise DataError(f"field '{name}' has a value per token; the loss of a pair needs one per sample")
    # The second lookup raises with the known fields.
    return tokens.per_sample[name] if name in tokens.per_sample else tokens[name]
