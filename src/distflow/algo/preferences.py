"""Losses of pairs: two responses of which one is preferred.

Both are among the tokens given, and found by two fields per sample: `pair`, an integer they share, and `preferred`, 1
for the preferred one and −1 for the other. Each of the two carries the loss of the pair, evenly over its tokens, so
that aggregated by seq-mean-token-sum the loss of the step is the mean over pairs. (An empty response carries nothing:
its pair then weighs half.)
"""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from distflow.algo.tokens import Loss, Tokens
from distflow.errors import ConfigError, DataError


def dpo(tokens: Tokens, beta: float = 0.1, label_smoothing: float = 0.0) -> Loss:
    """Direct preference optimisation (arXiv 2305.18290). Reads `pair`, `preferred` and `ref_logprobs`.

    The margin of a pair is beta × (how much likelier than under the reference the preferred response has become, less
    the same of the other). `label_smoothing` is the share of pairs thought to be the wrong way round.
    """
    if not beta > 0:
        raise ConfigError(f"the dpo loss has beta = {beta}; it must be above 0")
    if not 0 <= label_smoothing < 0.5:
        raise ConfigError(f"the dpo loss has label_smoothing = {label_smoothing}; it must be 0 or more, and below 0.5")
    margin, pair = _margins(tokens, beta * tokens.sums(tokens.logprobs - tokens["ref_logprobs"]))
    loss = -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)
    made = _spread(tokens, loss, margin, pair, "actor")
    if tokens.entropy is None:
        return made
    return Loss(made.per_token, {**made.metrics, "actor/entropy": tokens.entropy.detach()})


def preference(tokens: Tokens) -> Loss:
    """Of a reward model (Bradley–Terry): its value at the last token of a response is the score, and the preferred one
    is to have the higher. Reads `pair` and `preferred`."""
    if not bool((tokens.lengths > 0).all()):
        raise DataError("a response without tokens has no score to prefer; leave its pair out")
    margin, pair = _margins(tokens, tokens.values[tokens.lengths.cumsum(0) - 1])
    return _spread(tokens, -logsigmoid(margin), margin, pair, "reward_model")


def _margins(tokens: Tokens, scores: Tensor) -> tuple[Tensor, Tensor]:
    """[pairs]: the score [samples] of the preferred one, less that of the other; [samples]: which pair each is of."""
    names, preferred = _per_sample(tokens, "pair"), _per_sample(tokens, "preferred")
    if not bool(((preferred == 1) | (preferred == -1)).all()):
        raise DataError("field 'preferred' is 1 for the better response of a pair and -1 for the other, nothing else")
    ids, pair = torch.unique(names, return_inverse=True)
    for sign, half in ((1, "preferred"), (-1, "other")):
        found = torch.bincount(pair[preferred == sign], minlength=len(ids))
        if not bool((found == 1).all()):
            first = int((found != 1).nonzero()[0])
            raise DataError(
                f"pair {int(ids[first])} has {int(found[first])} responses that are the {half} one, among those whose"
                " loss is taken together; it must have one of each"
            )
    return scores.new_zeros(len(ids)).index_add(0, pair, scores * preferred.to(scores.dtype)), pair


def _spread(tokens: Tokens, loss: Tensor, margin: Tensor, pair: Tensor, name: str) -> Loss:
    """From [pairs] to tokens."""
    per_token = tokens.spread(loss[pair] / tokens.lengths.clamp(min=1))
    margin = tokens.spread(margin.detach()[pair])
    return Loss(per_token, {f"{name}/margin": margin, f"{name}/accuracy": (margin > 0).to(margin.dtype)})


def _per_sample(tokens: Tokens, name: str) -> Tensor:
    if name in tokens.per_token:
        raise DataError(f"field '{name}' has a value per token; the loss of a pair needs one per sample")
    return tokens.per_sample[name] if name in tokens.per_sample else tokens[name]  # which says what there is
