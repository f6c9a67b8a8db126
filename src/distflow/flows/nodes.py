"""Nodes that several flows share. Torch is imported when they run: flows are planned without it."""

import json
from typing import TYPE_CHECKING, Any

from distflow.flow import node

if TYPE_CHECKING:
    from distflow.data.batch import Batch
    from distflow.worker import Context

SHOWN = 8  # prompts of the held-out set whose responses are written down


@node(role="advantage", whole_groups=True, writes="advantage")
def group_advantage(batch: "Batch", ctx: "Context", scale: str = "std", baseline: str = "mean") -> Any:
    """A score against the others of its group: all responses to one prompt are in one place.

    The baseline `length` also reads `response_tokens`.
    """
    import torch

    from distflow.algo.advantages import group_advantages, zero_std_fraction

    groups = torch.from_numpy(batch.groups)
    lengths = torch.from_numpy(batch["response_tokens"].lengths) if baseline == "length" else None
    advantage = group_advantages(batch["score"], groups, scale, baseline, lengths)  # type: ignore[arg-type]
    ctx.metrics.log("advantage/mean", float(advantage.mean()), len(batch))
    ctx.metrics.log("reward/zero_std_frac", zero_std_fraction(batch["score"], groups), len(groups.unique()))
    return advantage


batch_advantage = node(group_advantage, id="batch_advantage", whole_batch=True)  # for scales that look at all groups


@node(role="report", whole_groups=True, writes=())
def report(batch: "Batch", ctx: "Context", rows: int, n: int) -> None:
    """`val/<source>/score` and, of several responses, the best one's; prompts beyond `rows` are repeats, to fill up."""
    import numpy as np

    sources = batch["data_source"] if "data_source" in batch else ["all"] * len(batch)
    score = batch["score"].numpy()
    for group in np.unique(batch.groups[batch.groups < rows]).tolist():
        mine = np.flatnonzero(batch.groups == group)
        source = sources[int(mine[0])]
        ctx.metrics.log(f"val/{source}/score", float(score[mine].mean()), len(mine))
        if n > 1:
            ctx.metrics.log(f"val/{source}/pass@{n}", float(score[mine].max()))
        if group < SHOWN and ctx.lead:
            _show(ctx, batch, mine[0])


def _show(ctx: "Context", batch: "Batch", i: int) -> None:
    row = {"step": ctx.step, **{f: batch[f][i] for f in ("prompt", "response")}, "score": float(batch["score"][i])}
    # One write, which no other worker's can come in between of.
    with open(ctx.folder / "samples.jsonl", "ab", buffering=0) as file:
        file.write((json.dumps(row, ensure_ascii=False) + "\n").encode())
