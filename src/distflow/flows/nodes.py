"""Nodes that several flows share. They import torch when they run: flows are planned without it."""

from typing import TYPE_CHECKING, Any

from distflow.algo.options import (
    Baseline,
    BestOfBaseline,
    Count,
    Estimator,
    Fraction,
    NonNegative,
    PositiveCount,
    Scale,
)
from distflow.flow import node

if TYPE_CHECKING:
    from distflow.batch.batch import Batch
    from distflow.batch.context import Context
    from distflow.batch.response_mask import ModelTokens


@node(role="advantage", whole_groups=True, writes="advantage")
def group_advantage(
    batch: "Batch",
    ctx: "Context",
    scale: Scale = "std",
    baseline: Baseline = "mean",
    field: str = "score",
    within: str | None = None,
) -> Any:
    """Compares the score of each sample (`field`) with its group; see distflow.algo.advantages.

    `within` names a field by whose values a group is divided further, such as the role that a sample plays. The
    baseline `length_weighted` also reads `response_tokens`.
    """
    import torch

    from distflow.algo.advantages import group_advantages
    from distflow.batch.response_mask import model_token_counts

    groups, score = torch.from_numpy(batch.groups), batch[field]
    if within is not None:
        values = batch[within].tolist() if isinstance(batch[within], torch.Tensor) else map(str, batch[within])
        numbers: dict[Any, int] = {}
        pairs = zip(batch.groups.tolist(), values, strict=True)
        groups = torch.tensor([numbers.setdefault(pair, len(numbers)) for pair in pairs], dtype=torch.int64)
    lengths = model_token_counts(batch) if baseline == "length_weighted" else None
    return _logged(group_advantages(score, groups, scale, baseline, lengths), score, groups, ctx)


batch_advantage = node(group_advantage, id="batch_advantage", whole_batch=True)  # for scales over all groups


@node(role="advantage", whole_groups=True, writes="advantage", optional=("response_mask", "turn_rewards"))
def optimal_token_advantage(batch: "Batch", ctx: "Context") -> Any:
    """Compares the return of each token with that of the group's tokens at its place; see distflow.algo.baselines."""
    import torch

    from distflow.algo.baselines import optimal_token_advantages
    from distflow.algo.returns import discounted_returns
    from distflow.batch.response_mask import ModelTokens

    model, groups = ModelTokens.of(batch, "energy"), torch.from_numpy(batch.groups)
    lengths = torch.from_numpy(model.lengths)
    returns = discounted_returns(_token_rewards(batch, model, 0.0), lengths)
    advantage = optimal_token_advantages(returns, model.select(batch["energy"].joined()), lengths, groups)
    _log_scores(batch["score"], groups, ctx)
    if len(advantage):
        ctx.metrics.log("advantage/mean", float(advantage.mean()), len(advantage))
    return model.spread(advantage)


length_advantage = node(group_advantage, optional="response_mask")  # for the baseline that counts tokens


@node(role="advantage", whole_groups=True, writes="advantage")
def best_of_k_advantage(batch: "Batch", ctx: "Context", k: PositiveCount, baseline: BestOfBaseline = "without") -> Any:
    """Weighs each sample by what it adds to the best of k; see distflow.algo.advantages."""
    import torch

    from distflow.algo.advantages import best_of_k_advantages

    groups, score = torch.from_numpy(batch.groups), batch["score"]
    return _logged(best_of_k_advantages(score, groups, k, baseline), score, groups, ctx)


@node(role="advantage", whole_batch=True, writes="advantage")
def summed_advantage(batch: "Batch", ctx: "Context") -> Any:
    """Normalises each of several rewards in its group, and adds them up; see distflow.algo.advantages."""
    import torch

    from distflow.algo.advantages import summed_advantages

    groups = torch.from_numpy(batch.groups)
    return _logged(summed_advantages(batch["scores"], batch["score_weights"][0], groups), batch["score"], groups, ctx)


def _logged(advantage: Any, score: Any, groups: Any, ctx: "Context") -> Any:
    """Logs the scores that advantages are of, and returns the advantages."""
    ctx.metrics.log("advantage/mean", float(advantage.mean()), len(score))
    _log_scores(score, groups, ctx)
    return advantage


def _log_scores(score: Any, groups: Any, ctx: "Context") -> None:
    from distflow.algo.advantages import mean_group_std, zero_std_fraction

    # Under dynamic sampling reward/mean is over all responses that were generated.
    ctx.metrics.log("reward/trained_mean", float(score.mean()), len(score))
    count = len(groups.unique())
    ctx.metrics.log("reward/std", mean_group_std(score, groups), count)
    ctx.metrics.log("reward/zero_std_frac", zero_std_fraction(score, groups), count)


@node(role="advantage", whole_groups=True, writes="keep")
def nonzero_std(batch: "Batch") -> Any:
    """Returns whether the scores of each sample's group differ; if they are all equal, its advantage is 0."""
    import numpy as np

    score = batch["score"].numpy()
    _, group = np.unique(batch.groups, return_inverse=True)
    lowest, highest = np.full(len(batch), np.inf), np.full(len(batch), -np.inf)
    np.minimum.at(lowest, group, score)
    np.maximum.at(highest, group, score)
    return (highest > lowest)[group]


@node(role="reward", writes="shaped_score", optional="response_mask")
def overlong_penalty(batch: "Batch", ctx: "Context", limit: Count, buffer: Count = 0, factor: NonNegative = 1.0) -> Any:
    """Adds DAPO's overlong penalty to the score; see distflow.algo.reward_shaping."""
    from distflow.algo.reward_shaping import overlong_penalty
    from distflow.batch.response_mask import model_token_counts

    penalty = overlong_penalty(model_token_counts(batch), limit, buffer, factor)
    ctx.metrics.log("reward/overlong_penalty", float(penalty.mean()), len(batch))
    return batch["score"] + penalty


@node(role="data", writes="wanted_margin")
def wanted_margin(batch: "Batch") -> Any:
    """Reads the column `margin`: by how much the chosen response of a pair is to be better."""
    import torch

    from distflow.errors import DataError

    for row, value in zip(batch.ids.tolist(), batch["margin"], strict=True):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise DataError(f"sample {row}: the column 'margin' is {value!r}; it must be a number")
    return torch.tensor([float(value) for value in batch["margin"]])


@node(role="data", writes="desirable")
def desirable(batch: "Batch") -> Any:
    """Reads the column `label`: whether the response is good, as 1 or −1."""
    import torch

    from distflow.errors import DataError

    for row, value in zip(batch.ids.tolist(), batch["label"], strict=True):
        if not isinstance(value, bool):
            raise DataError(f"sample {row}: the column 'label' is {value!r}; it must be true or false")
    return torch.tensor([1.0 if value else -1.0 for value in batch["label"]])


@node(role="data", whole_batch=True, writes="mismatched_response")
def mismatched(batch: "Batch") -> list[str]:
    """Gives each prompt the response of the next one."""
    order = sorted(range(len(batch)), key=lambda i: batch.ids[i])
    following = dict(zip(order, [*order[1:], *order[:1]], strict=True))
    return [batch["response"][following[i]] for i in range(len(batch))]


@node(role="advantage", writes="log_ratio")
def mismatched_log_ratio(batch: "Batch") -> Any:
    """Returns the log-ratio of the policy to the reference for each mismatched response."""
    import torch

    ours, theirs = batch["mismatched_old_logprobs"], batch["mismatched_ref_logprobs"]
    return torch.stack([(a - b).sum() for a, b in zip(ours, theirs, strict=True)]) if len(batch) else torch.zeros(0)


@node(role="advantage", whole_batch=True, writes="kl_baseline")
def kl_baseline(batch: "Batch", ctx: "Context") -> Any:
    """Returns the mean of the log-ratios, at least 0, for each sample: an estimate of the divergence."""
    mean = batch["log_ratio"].double().mean().clamp(min=0).float()
    ctx.metrics.log("actor/kl_baseline", float(mean))
    return mean.repeat(len(batch))


@node(role="advantage", writes="advantage")
def greedy_baseline_advantage(batch: "Batch", ctx: "Context") -> Any:
    """Subtracts the score of the greedy response to the same prompt."""
    advantage = batch["score"] - batch["greedy_score"]
    ctx.metrics.log("advantage/mean", float(advantage.mean()), len(batch))
    return advantage


@node(role="advantage", writes="advantage", optional="response_mask")
def teacher_advantage(batch: "Batch", ctx: "Context", field: str, task: NonNegative = 0.0) -> Any:
    """The advantage of a token is log teacher − log student: on average, minus the reverse KL divergence.

    `field`: the teacher's log-probs. `task` weighs `task_advantage`, of the response, which is added.
    """
    import torch

    from distflow.batch.response_mask import ModelTokens

    model = ModelTokens.of(batch, "rollout_logprobs")
    advantage = model.select(batch[field].joined() - batch["rollout_logprobs"].joined())
    if len(advantage):
        ctx.metrics.log("distill/reverse_kl", float(-advantage.mean()), len(advantage))
    if task:
        advantage = advantage + task * batch["task_advantage"].repeat_interleave(torch.from_numpy(model.lengths))
    return model.spread(advantage)


task_advantage = node(group_advantage, id="task_advantage", writes="task_advantage")  # beside a teacher's


@node(role="advantage", writes="kl_divergence", optional="response_mask")
def kl_divergence(batch: "Batch", estimator: Estimator = "k3") -> Any:
    """Estimates the KL divergence of each response from the reference model, as the mean over its tokens."""
    import torch

    from distflow.algo.kl import kl
    from distflow.batch.response_mask import ModelTokens

    model = ModelTokens.of(batch, "ref_logprobs")
    lengths = torch.from_numpy(model.lengths)
    per_token = kl(estimator, *(model.select(x.joined()) for x in (_policy_logprobs(batch), batch["ref_logprobs"])))
    sample = torch.arange(len(batch)).repeat_interleave(lengths)
    return per_token.new_zeros(len(batch)).index_add(0, sample, per_token) / lengths.clamp(min=1)


@node(role="advantage", writes=("raw_advantage", "returns", "moments"), optional=("response_mask", "turn_rewards"))
def gae(batch: "Batch", gamma: Fraction = 1.0, lam: Fraction = 0.95, kl: float = 0.0) -> dict[str, Any]:
    """Computes the advantage and return of each token from `score` and `old_values`; `kl` weighs a KL penalty."""
    import torch

    from distflow.algo.returns import gae, moments
    from distflow.batch.response_mask import ModelTokens

    model = ModelTokens.of(batch, "old_values")
    values, lengths = model.select(batch["old_values"].joined()), torch.from_numpy(model.lengths)
    advantage, returns = gae(_token_rewards(batch, model, kl), values, lengths, gamma, lam)
    return {
        "raw_advantage": model.spread(advantage),
        "returns": model.spread(returns),
        "moments": torch.stack([moments(x, lengths) for x in (advantage, returns, returns - values)], 1),
    }


@node(role="advantage", writes=("raw_advantage", "moments"), optional=("response_mask", "turn_rewards"))
def discounted_returns(batch: "Batch", gamma: Fraction = 1.0, kl: float = 0.0) -> dict[str, Any]:
    """Computes the return of each token from `score`, as its advantage; `kl` weighs a KL penalty."""
    import torch

    from distflow.algo.returns import discounted_returns, moments
    from distflow.batch.response_mask import ModelTokens

    model = ModelTokens.of(batch, "rollout_logprobs")
    lengths = torch.from_numpy(model.lengths)
    returns = discounted_returns(_token_rewards(batch, model, kl), lengths, gamma)
    return {"raw_advantage": model.spread(returns), "moments": moments(returns, lengths)[:, None]}


def _token_rewards(batch: "Batch", model: "ModelTokens", kl_weight: float) -> Any:
    """Returns the rewards of the model's tokens: the score at the last of each response, less the KL penalty.

    Rewards of single turns are a part of the score: they go to the last tokens of these turns.
    """
    import torch

    from distflow.algo.kl import kl
    from distflow.algo.returns import token_rewards

    lengths, score = torch.from_numpy(model.lengths), batch["score"]
    penalty = None
    if kl_weight:
        penalty = kl_weight * model.select(kl("k1", _policy_logprobs(batch).joined(), batch["ref_logprobs"].joined()))
    if "turn_rewards" not in batch:
        return token_rewards(score, lengths, penalty)
    turns = model.select(batch["turn_rewards"].joined()).to(score.dtype)
    sample = torch.arange(len(batch)).repeat_interleave(lengths)
    return token_rewards(score - torch.zeros_like(score).index_add(0, sample, turns), lengths, penalty) + turns


def _policy_logprobs(batch: "Batch") -> Any:
    """Returns the log-probs that the trainer computed before the update, if a flow has them, else the rollout's."""
    return batch["old_logprobs" if "old_logprobs" in batch else "rollout_logprobs"]


def whiten_over_batch(estimates: Any) -> Any:
    """Whitens `raw_advantage` over all tokens of the step. Only `moments` are gathered, a few bytes a sample."""
    return whiten(estimates["raw_advantage"], merge_moments(estimates["moments"]))


@node(role="advantage", whole_batch=True, writes="batch_moments")
def merge_moments(batch: "Batch", ctx: "Context") -> Any:
    """Merges the moments of all samples and repeats them for each; logs the explained variance of a critic."""
    import torch

    from distflow.algo.returns import explained_variance, merge_moments

    raw_advantage, *of_critic = batch["moments"].unbind(1)
    merged = merge_moments(raw_advantage)
    ctx.metrics.log("advantage/raw_mean", float(merged[1]))
    if of_critic:
        returns, errors = of_critic
        ctx.metrics.log("critic/explained_variance", explained_variance(returns, errors))
        ctx.metrics.log("critic/returns_mean", float(merge_moments(returns)[1]))
    return torch.stack([merged] * len(batch))


@node(role="advantage", writes="advantage", optional="response_mask")
def whiten(batch: "Batch", ctx: "Context") -> Any:
    """Whitens `raw_advantage` with `batch_moments`, the same for all samples."""
    from distflow.algo.returns import whiten
    from distflow.batch.response_mask import ModelTokens

    model = ModelTokens.of(batch, "raw_advantage")
    advantage = whiten(model.select(batch["raw_advantage"].joined()), batch["batch_moments"][:1])
    if len(advantage):
        ctx.metrics.log("advantage/mean", float(advantage.mean()), len(advantage))
    return model.spread(advantage)


@node(role="report", whole_groups=True, writes=())
def report(batch: "Batch", ctx: "Context", n: int) -> None:
    """Logs `val/<source>/score` and, with several responses per prompt, `pass@k`."""
    import numpy as np

    from distflow.algo.pass_at_k import pass_at_k, reported_ks

    sources = batch["data_source"] if "data_source" in batch else ["all"] * len(batch)
    score = batch["score"].numpy()
    for group in np.unique(batch.groups).tolist():
        samples = np.flatnonzero(batch.groups == group)
        source = sources[int(samples[0])]
        ctx.metrics.log(f"val/{source}/score", float(score[samples].mean()), len(samples))
        for k in reported_ks(n):
            ctx.metrics.log(f"val/{source}/pass@{k}", pass_at_k(score[samples].tolist(), k))
