"""Nodes that several flows share. They import torch when they run: flows are planned without it."""

import json
from typing import TYPE_CHECKING, Any

from distflow.flow import node

if TYPE_CHECKING:
    from distflow.data.batch import Batch
    from distflow.data.context import Context

SAVED_PROMPTS = 8  # of the held-out set, a response to each of which goes to samples.jsonl


@node(role="advantage", whole_groups=True, writes="advantage")
def group_advantage(
    batch: "Batch", ctx: "Context", scale: str = "std", baseline: str = "mean", field: str = "score"
) -> Any:
    """Compares the score of each sample (`field`) with its group; see distflow.algo.advantages.

    The baseline `length_weighted` also reads `response_tokens`.
    """
    import torch

    from distflow.algo.advantages import group_advantages, mean_group_std, zero_std_fraction

    groups, score = torch.from_numpy(batch.groups), batch[field]
    lengths = torch.from_numpy(batch["response_tokens"].lengths) if baseline == "length_weighted" else None
    advantage = group_advantages(score, groups, scale, baseline, lengths)  # type: ignore[arg-type]
    ctx.metrics.log("advantage/mean", float(advantage.mean()), len(batch))
    # Under dynamic sampling reward/mean is over all responses that were generated.
    ctx.metrics.log("reward/trained_mean", float(score.mean()), len(batch))
    count = len(groups.unique())
    ctx.metrics.log("reward/std", mean_group_std(score, groups), count)
    ctx.metrics.log("reward/zero_std_frac", zero_std_fraction(score, groups), count)
    return advantage


batch_advantage = node(group_advantage, id="batch_advantage", whole_batch=True)  # for scales over all groups


@node(role="advantage", whole_groups=True, writes="keep")
def nonzero_std(batch: "Batch") -> Any:
    """Says of each sample whether the scores of its group differ; if they are all equal, its advantage is 0."""
    import numpy as np

    score = batch["score"].numpy()
    _, group = np.unique(batch.groups, return_inverse=True)
    lowest, highest = np.full(len(batch), np.inf), np.full(len(batch), -np.inf)
    np.minimum.at(lowest, group, score)
    np.maximum.at(highest, group, score)
    return (highest > lowest)[group]


@node(role="reward", writes="shaped_score")
def overlong_penalty(batch: "Batch", ctx: "Context", limit: int, buffer: int = 0, factor: float = 1.0) -> Any:
    """Adds DAPO's overlong penalty to the score; see distflow.algo.reward_shaping."""
    import torch

    from distflow.algo.reward_shaping import overlong_penalty

    penalty = overlong_penalty(torch.from_numpy(batch["response_tokens"].lengths), limit, buffer, factor)
    ctx.metrics.log("reward/overlong_penalty", float(penalty.mean()), len(batch))
    return batch["score"] + penalty


@node(role="advantage", writes="advantage")
def greedy_baseline_advantage(batch: "Batch", ctx: "Context") -> Any:
    """Subtracts the score of the greedy response to the same prompt."""
    advantage = batch["score"] - batch["greedy_score"]
    ctx.metrics.log("advantage/mean", float(advantage.mean()), len(batch))
    return advantage


@node(role="advantage", writes="kl_divergence")
def kl_divergence(batch: "Batch", estimator: str = "k3") -> Any:
    """Estimates the KL divergence of each response from the reference model, as the mean over its tokens."""
    import torch

    from distflow.algo.kl import kl

    logprobs, ref_logprobs = batch["rollout_logprobs"], batch["ref_logprobs"]
    lengths = torch.from_numpy(logprobs.lengths)
    per_token = kl(estimator, logprobs.joined(), ref_logprobs.joined())  # type: ignore[arg-type]
    sample = torch.arange(len(batch)).repeat_interleave(lengths)
    return per_token.new_zeros(len(batch)).index_add(0, sample, per_token) / lengths.clamp(min=1)


@node(role="advantage", writes=("raw_advantage", "returns", "moments"))
def gae(batch: "Batch", gamma: float = 1.0, lam: float = 0.95, kl: float = 0.0) -> dict[str, Any]:
    """Computes the advantage and return of each token from `score` and `old_values`; `kl` weighs a KL penalty."""
    import torch

    from distflow.algo.returns import gae, moments
    from distflow.data.batch import Ragged

    values = batch["old_values"]
    lengths = torch.from_numpy(values.lengths)
    advantage, returns = gae(_token_rewards(batch, lengths, kl), values.joined(), lengths, gamma, lam)
    return {
        "raw_advantage": Ragged.packed(advantage, values.lengths),
        "returns": Ragged.packed(returns, values.lengths),
        "moments": torch.stack([moments(x, lengths) for x in (advantage, returns, returns - values.joined())], 1),
    }


@node(role="advantage", writes=("raw_advantage", "moments"))
def discounted_returns(batch: "Batch", gamma: float = 1.0, kl: float = 0.0) -> dict[str, Any]:
    """Computes the return of each token from `score`, as its advantage; `kl` weighs a KL penalty."""
    import torch

    from distflow.algo.returns import discounted_returns, moments
    from distflow.data.batch import Ragged

    counts = batch["rollout_logprobs"].lengths
    lengths = torch.from_numpy(counts)
    returns = discounted_returns(_token_rewards(batch, lengths, kl), lengths, gamma)
    return {"raw_advantage": Ragged.packed(returns, counts), "moments": moments(returns, lengths)[:, None]}


def _token_rewards(batch: "Batch", lengths: Any, kl_weight: float) -> Any:
    from distflow.algo.kl import kl
    from distflow.algo.returns import token_rewards

    if not kl_weight:
        return token_rewards(batch["score"], lengths)
    divergence = kl("k1", batch["rollout_logprobs"].joined(), batch["ref_logprobs"].joined())
    return token_rewards(batch["score"], lengths, kl_weight * divergence)


def whiten_over_batch(estimates: Any) -> Any:
    """Whitens `raw_advantage` over all tokens of the step. Only `moments` are gathered, a few bytes a sample."""
    return whiten(estimates["raw_advantage"], merge_moments(estimates["moments"]))


@node(role="advantage", whole_batch=True, writes="batch_moments")
def merge_moments(batch: "Batch", ctx: "Context") -> Any:
    """Merges the moments of all samples and repeats them for each; logs how well a critic predicts the returns."""
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


@node(role="advantage", writes="advantage")
def whiten(batch: "Batch", ctx: "Context") -> Any:
    """Whitens `raw_advantage` with `batch_moments`, which are the same for all samples."""
    from distflow.algo.returns import whiten
    from distflow.data.batch import Ragged

    raw = batch["raw_advantage"]
    advantage = whiten(raw.joined(), batch["batch_moments"][:1])
    if len(advantage):
        ctx.metrics.log("advantage/mean", float(advantage.mean()), len(advantage))
    return Ragged.packed(advantage, raw.lengths)


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
        if group < SAVED_PROMPTS and ctx.lead:
            _save_sample(ctx, batch, samples[0])


def _save_sample(ctx: "Context", batch: "Batch", i: int) -> None:
    row = {"step": ctx.step, **{f: batch[f][i] for f in ("prompt", "response")}, "score": float(batch["score"][i])}
    # All workers append to this file: a line is one unbuffered write, so that lines do not interleave.
    with open(ctx.folder / "samples.jsonl", "ab", buffering=0) as file:
        file.write((json.dumps(row, ensure_ascii=False) + "\n").encode())
