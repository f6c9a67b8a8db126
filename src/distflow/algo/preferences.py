"""Losses of preference pairs: of two responses to a prompt, one is preferred.

Both are among the tokens, and two fields per sample find them: `pair`, an integer they share, and `preferred`, 1 for
the preferred response and −1 for the other. Each carries the loss of the pair, evenly over its tokens, so that with
seq-mean-token-sum the loss of the step is the mean over pairs. (An empty response carries nothing: its pair then
weighs half.)
"""

from typing import get_args

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from distflow.algo.options import NonNegative, Positive, PreferenceKind, Smoothing
from distflow.algo.tokens import Loss, Tokens
from distflow.errors import ConfigError, DataError, suggest


def dpo(
    tokens: Tokens, beta: Positive = 0.1, label_smoothing: Smoothing = 0.0, kind: PreferenceKind = "sigmoid"
) -> Loss:
    """Direct preference optimisation (arXiv 2305.18290). Reads `pair`, `preferred` and `ref_logprobs`.

    The margin m of a pair is beta × (log-ratio of the policy to the reference for the preferred response, less the
    log-ratio for the other). `label_smoothing` is the assumed share of pairs whose label is wrong. With it, s:

    - sigmoid: −(1 − s) log σ(m) − s log σ(−m)
    - sigmoid_norm: the same, of log-ratios that are divided by the length of their response
    - robust: (−(1 − s) log σ(m) + s log σ(−m)) / (1 − 2s), unbiased under wrong labels (arXiv 2403.00409)
    - hinge: max(0, 1 − m) (arXiv 2305.10425)
    - ipo: (m / beta − 1 / (2 beta))², of log-ratios divided by length, as TRL has it (arXiv 2310.12036)
    """
    if not beta > 0:
        raise ConfigError(f"the dpo loss has beta = {beta}; it must be above 0")
    if not 0 <= label_smoothing < 0.5:
        raise ConfigError(f"the dpo loss has label_smoothing = {label_smoothing}; it must be 0 or more, and below 0.5")
    if kind not in get_args(PreferenceKind):
        raise ConfigError(f"the dpo loss has no kind '{kind}'{suggest(kind, get_args(PreferenceKind))}")
    if label_smoothing and kind in ("hinge", "ipo"):
        raise ConfigError(f"the dpo loss of kind '{kind}' has no label_smoothing; leave it out")
    log_ratios = tokens.sum_per_sample(tokens.logprobs - tokens["ref_logprobs"])
    if kind in ("sigmoid_norm", "ipo"):
        log_ratios = log_ratios / tokens.lengths.clamp(min=1)
    margin, pair = _margins(tokens, beta * log_ratios)
    match kind:
        case "sigmoid" | "sigmoid_norm":
            per_pair = -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)
        case "robust":
            likely, unlikely = (1 - label_smoothing) * logsigmoid(margin), label_smoothing * logsigmoid(-margin)
            per_pair = (unlikely - likely) / (1 - 2 * label_smoothing)
        case "hinge":
            per_pair = (1 - margin).relu()
        case "ipo":
            per_pair = (margin / beta - 1 / (2 * beta)).square()
    return _of_policy(tokens, _pair_loss(tokens, per_pair, margin, pair, "actor"))


def orpo(tokens: Tokens, beta: NonNegative = 0.1) -> Loss:
    """Supervised fine-tuning on the preferred response, and odds that it is the likelier one (arXiv 2403.07691).

    With p the geometric mean of the probabilities of a response's tokens: −log p of the preferred one, less beta ×
    log σ(log odds of p, less those of the other). No reference model. Reads `pair` and `preferred`.
    """
    if not beta >= 0:
        raise ConfigError(f"the orpo loss has beta = {beta}; it must be 0 or more")
    mean = (tokens.sum_per_sample(tokens.logprobs) / tokens.lengths.clamp(min=1)).clamp(max=-1e-6)
    margin, pair = _margins(tokens, mean - torch.log(-torch.expm1(mean)))
    chosen = _per_sample(tokens, "preferred") == 1
    nll = mean.new_zeros(len(margin)).index_add(0, pair[chosen], -mean[chosen])
    loss = _pair_loss(tokens, nll - beta * logsigmoid(margin), margin, pair, "actor")
    return _of_policy(tokens, loss)


def kto(
    tokens: Tokens, beta: Positive = 0.1, desirable_weight: NonNegative = 1.0, undesirable_weight: NonNegative = 1.0
) -> Loss:
    """KTO: responses that are each good or bad, without pairs (arXiv 2402.01306).

    Reads `desirable`, 1 or −1, `ref_logprobs` and `kl_baseline`, z. With r = log-ratio of the policy to the reference:
    1 − σ(beta (r − z)) for a good response, 1 − σ(beta (z − r)) for a bad one, times their weights. Each response
    carries its loss evenly over its tokens.
    """
    if not beta > 0:
        raise ConfigError(f"the kto loss has beta = {beta}; it must be above 0")
    for name, weight in (("desirable_weight", desirable_weight), ("undesirable_weight", undesirable_weight)):
        if not weight >= 0:
            raise ConfigError(f"the kto loss has {name} = {weight}; it must be 0 or more")
    desirable = _per_sample(tokens, "desirable")
    reward = tokens.sum_per_sample(tokens.logprobs - tokens["ref_logprobs"])
    gain = torch.sigmoid(beta * desirable * (reward - _per_sample(tokens, "kl_baseline")))
    per_sample = torch.where(desirable > 0, desirable_weight, undesirable_weight) * (1 - gain)
    per_token = tokens.expand(per_sample / tokens.lengths.clamp(min=1))
    return _of_policy(
        tokens, Loss(per_token, {"actor/reward_margin": tokens.expand(desirable * beta * reward.detach())})
    )


def preference(tokens: Tokens, centre: NonNegative = 0.0) -> Loss:
    """The Bradley–Terry loss of a reward model, whose score is the value at the last token of a response.

    Reads `pair` and `preferred`, and `wanted_margin` if there is such a field: by how much the preferred response
    is to be better. `centre` weighs the square of the sum of both scores, which holds their mean near 0
    (arXiv 2312.09244).
    """
    if not centre >= 0:
        raise ConfigError(f"the preference loss has centre = {centre}; it must be 0 or more")
    if not bool((tokens.lengths > 0).all()):
        raise DataError("a response without tokens has no score; remove its pair from the data")
    scores = tokens.values[tokens.lengths.cumsum(0) - 1]
    margin, pair = _margins(tokens, scores)
    wanted = torch.zeros_like(margin)
    if "wanted_margin" in tokens:
        wanted[pair] = _per_sample(tokens, "wanted_margin").to(margin.dtype)
    per_pair = -logsigmoid(margin - wanted)
    if centre:
        per_pair = per_pair + centre * torch.zeros_like(margin).index_add(0, pair, scores).square()
    return _pair_loss(tokens, per_pair, margin, pair, "reward_model")


def _of_policy(tokens: Tokens, loss: Loss) -> Loss:
    """Adds the entropy to the metrics, if it was computed."""
    if tokens.entropy is None:
        return loss
    return Loss(loss.per_token, {**loss.metrics, "actor/entropy": tokens.entropy.detach()})


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
