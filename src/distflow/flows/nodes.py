"""Nodes that several flows share. Torch is imported when they run: flows are planned without it."""

import json
from typing import TYPE_CHECKING, Any

from distflow.flow import node

if TYPE_CHECKING:
    from distflow.data.batch import Batch
    from distflow.data.context import Context

SHOWN = 8  # prompts of the held-out set whose responses are written down


@node(role="advantage", whole_groups=True, writes="advantage")
def group_advantage(
    batch: "Batch", ctx: "Context", scale: str = "std", baseline: str = "mean", of: str = "score"
) -> Any:
    """A score (the field `of`) against the others of its group: all responses to one prompt are in one place.

    The baseline `length` also reads `response_tokens`.
    """
    import torch

    from distflow.algo.advantages import group_advantages, mean_std, zero_std_fraction

    groups, score = torch.from_numpy(batch.groups), batch[of]
    lengths = torch.from_numpy(batch["response_tokens"].lengths) if baseline == "length" else None
    advantage = group_advantages(score, groups, scale, baseline, lengths)  # type: ignore[arg-type]
    ctx.metrics.log("advantage/mean", float(advantage.mean()), len(batch))
    ctx.metrics.log("reward/trained_mean", float(score.mean()), len(batch))  # reward/mean tells of all that was drawn
    count = len(groups.unique())
    ctx.metrics.log("reward/std", mean_std(score, groups), count)
    ctx.metrics.log("reward/zero_std_frac", zero_std_fraction(score, groups), count)
    return advantage


batch_advantage = node(group_advantage, id="batch_advantage", whole_batch=True)  # for scales that look at all groups


@node(role="advantage", whole_groups=True, writes="keep")
def informative(batch: "Batch") -> Any:
    """Whether the scores of a sample's group differ: where they are all equal there is nothing to learn."""
    import numpy as np

    score = batch["score"].numpy()
    _, group = np.unique(batch.groups, return_inverse=True)
    lowest, highest = np.full(len(batch), np.inf), np.full(len(batch), -np.inf)
    np.minimum.at(lowest, group, score)
    np.maximum.at(highest, group, score)
    return (highest > lowest)[group]


@node(role="reward", writes="shaped_score")
def mark_down_long(batch: "Batch", ctx: "Context", limit: int, buffer: int = 0, penalty: float = 1.0) -> Any:
    """The score, less a penalty for responses near the limit; see distflow.algo.shaping.overlong."""
    import torch

    from distflow.algo.shaping import overlong

    less = overlong(torch.from_numpy(batch["response_tokens"].lengths), limit, buffer, penalty)
    ctx.metrics.log("reward/long_penalty", float(less.mean()), len(batch))
    return batch["score"] + less


@node(role="advantage", writes="advantage")
def better_than_greedy(batch: "Batch", ctx: "Context") -> Any:
    advantage = batch["score"] - batch["greedy_score"]
    ctx.metrics.log("advantage/mean", float(advantage.mean()), len(batch))
    return advantage


@node(role="advantage", writes="divergence")
def divergence(batch: "Batch", kind: str = "k3") -> Any:
    """Of each response from the reference model, the mean over its tokens."""
    import torch

    from distflow.algo.kl import kl

    ours, theirs = batch["rollout_logprobs"], batch["ref_logprobs"]
    lengths = torch.from_numpy(ours.lengths)
    per_token = kl(kind, ours.joined(), theirs.joined())  # type: ignore[arg-type]
    sample = torch.arange(len(batch)).repeat_interleave(lengths)
    return per_token.new_zeros(len(batch)).index_add(0, sample, per_token) / lengths.clamp(min=1)


@node(role="advantage", writes=("raw_advantage", "returns", "moments"))
def gae(batch: "Batch", gamma: float = 1.0, lam: float = 0.95, kl: float = 0.0) -> dict[str, Any]:
    """Advantage and return of each token, from `score` and `old_values`; with `kl`, less a price per token."""
    import torch

    from distflow.algo.returns import gae, moments
    from distflow.data.batch import Ragged

    values = batch["old_values"]
    lengths = torch.from_numpy(values.lengths)
    advantage, gained = gae(_rewards(batch, lengths, kl), values.joined(), lengths, gamma, lam)
    seen = [moments(x, lengths) for x in (advantage, gained, gained - values.joined())]
    return {
        "raw_advantage": Ragged.packed(advantage, values.lengths),
        "returns": Ragged.packed(gained, values.lengths),
        "moments": torch.stack(seen, 1),
    }


@node(role="advantage", writes=("raw_advantage", "moments"))
def returns(batch: "Batch", gamma: float = 1.0, kl: float = 0.0) -> dict[str, Any]:
    """What is still to come at each token of the `score`; with `kl`, less a price per token."""
    import torch

    from distflow.algo.returns import discounted_returns, moments
    from distflow.data.batch import Ragged

    all_lengths = batch["rollout_logprobs"].lengths
    lengths = torch.from_numpy(all_lengths)
    gained = discounted_returns(_rewards(batch, lengths, kl), lengths, gamma)
    return {"raw_advantage": Ragged.packed(gained, all_lengths), "moments": moments(gained, lengths)[:, None]}


def _rewards(batch: "Batch", lengths: Any, kl: float) -> Any:
    from distflow.algo.kl import kl as estimate
    from distflow.algo.returns import token_rewards

    if not kl:
        return token_rewards(batch["score"], lengths)
    apart = estimate("k1", batch["rollout_logprobs"].joined(), batch["ref_logprobs"].joined())
    return token_rewards(batch["score"], lengths, kl * apart)


def whitened(found: Any) -> Any:
    """`raw_advantage` in standard deviations from the mean of all tokens of the step. Few bytes a sample are moved."""
    return whiten(found["raw_advantage"], over_all(found["moments"]))


@node(role="advantage", whole_batch=True, writes="spread")
def over_all(batch: "Batch", ctx: "Context") -> Any:
    """The moments of all samples as one, for each of them; where there is a critic, also how good it is."""
    import torch

    from distflow.algo.returns import explained_variance, merged

    of = batch["moments"].unbind(1)
    whole = merged(of[0])
    ctx.metrics.log("advantage/raw_mean", float(whole[1]))
    if len(of) == 3:
        ctx.metrics.log("critic/explained_variance", explained_variance(of[1], of[2]))
        ctx.metrics.log("critic/returns_mean", float(merged(of[1])[1]))
    return torch.stack([whole] * len(batch))


@node(role="advantage", writes="advantage")
def whiten(batch: "Batch", ctx: "Context") -> Any:
    from distflow.algo.returns import whiten
    from distflow.data.batch import Ragged

    raw = batch["raw_advantage"]
    advantage = whiten(raw.joined(), batch["spread"][:1])
    if len(advantage):
        ctx.metrics.log("advantage/mean", float(advantage.mean()), len(advantage))
    return Ragged.packed(advantage, raw.lengths)


@node(role="report", whole_groups=True, writes=())
def report(batch: "Batch", ctx: "Context", rows: int, n: int) -> None:
    """`val/<source>/score` and, of several responses, `pass@k`; prompts beyond `rows` are repeats, to fill up."""
    import numpy as np

    from distflow.algo.best import best_of, widths

    sources = batch["data_source"] if "data_source" in batch else ["all"] * len(batch)
    score = batch["score"].numpy()
    for group in np.unique(batch.groups[batch.groups < rows]).tolist():
        mine = np.flatnonzero(batch.groups == group)
        source = sources[int(mine[0])]
        ctx.metrics.log(f"val/{source}/score", float(score[mine].mean()), len(mine))
        for k in widths(n):
            ctx.metrics.log(f"val/{source}/pass@{k}", best_of(score[mine].tolist(), k))
        if group < SHOWN and ctx.lead:
            _show(ctx, batch, mine[0])


def _show(ctx: "Context", batch: "Batch", i: int) -> None:
    row = {"step": ctx.step, **{f: batch[f][i] for f in ("prompt", "response")}, "score": float(batch["score"][i])}
    # One write, which no other worker's can come in between of.
    with open(ctx.folder / "samples.jsonl", "ab", buffering=0) as file:
        file.write((json.dumps(row, ensure_ascii=False) + "\n").encode())
