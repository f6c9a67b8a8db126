"""A flow whose stages sleep: generation as long as continuous batching takes, scoring and training a fixed time."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from distflow import Batch, Context, flow, node
from distflow.comm.collectives import SendReceive
from distflow.roles.context import RoleContext


@contextmanager
def noted(ctx: Context, name: str) -> Iterator[None]:
    """Writes when a stage began and ended."""
    start = time.monotonic()
    yield
    with open(ctx.folder / f"stages.{ctx.rank}.jsonl", "a") as file:
        file.write(json.dumps([ctx.step, name, start, time.monotonic()]) + "\n")


def slots_in_order(work: Any, slots: int) -> tuple[Any, Any]:
    """Returns when each piece of work starts and ends if the first slot that is free takes the next one."""
    free, starts, ends = np.zeros(slots), np.zeros(len(work)), np.zeros(len(work))
    for i, seconds in enumerate(work):
        slot = free.argmin()
        starts[i] = free[slot]
        ends[i] = free[slot] = free[slot] + seconds
    return starts, ends


class Actor:
    """A response takes `token_s` × its length, log-normal with mean 1; `slots` are generated at once, in order.

    An update takes `update_s`.
    """

    def __init__(self, role: RoleContext, token_s: float, slots: int, update_s: float, sigma: float) -> None:
        self.rank, self.token_s, self.slots, self.update_s, self.sigma = role.rank, token_s, slots, update_s, sigma
        self.source = role.layouts["update"].ranks[0]
        self.destinations = role.layouts["generate"].ranks

    def copy_weights(self) -> None:
        return None

    def sync_weights(self, version: int, weights: Any = None) -> Iterator[SendReceive]:
        data = torch.tensor([version]).view(torch.uint8)
        if self.rank == self.source:
            yield SendReceive(8, lambda out: out.copy_(data), dict.fromkeys(self.destinations, (0, 8)), data[:0], {})
        elif self.rank in self.destinations:
            yield SendReceive(0, lambda out: None, {}, data, {self.source: (0, 8)})

    @node(type="inference", writes=("length",), generates=True)
    def generate(self, batch: Batch, ctx: Context) -> Any:
        lengths, partial = self.lengths(batch.ids), ctx.partial
        begun = (
            dict(zip(partial.begun.ids.tolist(), partial.begun["left"].tolist(), strict=True))
            if (partial and partial.begun)
            else {}
        )
        ids = np.concatenate([batch.ids, partial.ahead.ids]) if partial else batch.ids
        work = np.array([begun.get(i, w) for i, w in zip(ids.tolist(), self.token_s * self.lengths(ids), strict=True)])
        starts, ends = slots_in_order(work, self.slots)
        with noted(ctx, "generate"):
            begin = time.monotonic()
            parts = ctx.chunks.parts if ctx.chunks else [np.arange(len(batch))]
            for i in sorted(range(len(parts)), key=lambda i: ends[parts[i]].max()):
                time.sleep(max(0.0, begin + ends[parts[i]].max() - time.monotonic()))
                if ctx.chunks:
                    ctx.chunks.leave(i, {"length": torch.from_numpy(lengths[parts[i]])})
        if partial:
            own, over = len(batch), ends[: len(batch)].max()
            left = work[own:] - np.clip(over - starts[own:], 0, work[own:])
            kept = np.flatnonzero(starts[own:] < over)
            ahead = partial.ahead
            partial.carry(Batch(ahead.ids[kept], ahead.groups[kept], {"left": torch.from_numpy(left[kept])}))
        return torch.from_numpy(lengths)

    def lengths(self, ids: Any) -> Any:
        normal = np.array([np.random.default_rng(int(i)).standard_normal() for i in ids])
        return np.exp(self.sigma * normal - self.sigma**2 / 2)

    @node(type="train", writes=())
    def update(self, batch: Batch, ctx: Context) -> None:
        with noted(ctx, "update"):
            time.sleep(self.update_s)


class Judge:
    """Scores a step in `score_s`, in proportion to its samples."""

    def __init__(self, score_s: float, samples: int) -> None:
        self.per_sample_s = score_s / samples

    @node(type="inference", writes=("score",))
    def score(self, batch: Batch, ctx: Context) -> Any:
        with noted(ctx, "score"):
            time.sleep(self.per_sample_s * len(batch) * len(ctx.layout.replicas))
        return batch["length"]


@flow
def stages(prompts, actor, judge):
    rollout = actor.generate(prompts["prompt"])
    actor.update(rollout, judge.score(rollout))
