"""A GRPO-shaped flow of plain functions, without a model: sums are answered, judged twice in parallel, and compared.

                  ┌─ correct ─┐
data ─ generate ──┤           ├── advantage ── update
                  └─ brevity ─┘
"""

import numpy as np

from distflow import flow, node


@node(role="rollout", type="inference", writes=["answer", "tokens"])
def generate(batch, ctx, error_rate=0.4):
    """In place of a model: answers at some length, and now and then wrongly. Noise depends on the sample alone."""
    answers, tokens = [], []
    for sample, question in zip(batch.ids, batch["question"], strict=True):
        rng = np.random.default_rng([ctx.seed, int(sample)])
        a, b = (int(x) for x in question.split("+"))
        answers.append(str(a + b + (rng.random() < error_rate)))
        tokens.append(rng.integers(0, 32_000, int(rng.lognormal(6, 1))))
    return {"answer": answers, "tokens": tokens}


@node(role="reward")
def correct(batch):
    return [float(a == s) for a, s in zip(batch["answer"], batch["solution"], strict=True)]


@node(role="reward")
def brevity(batch):
    return [-len(t) / 10_000 for t in batch["tokens"]]


@node(role="advantage", whole_groups=True)
def advantage(batch):
    """A sample's score less the mean of its group: needs all answers to one question in one place."""
    score = np.array(batch["correct"]) + np.array(batch["brevity"])
    _, group = np.unique(batch.groups, return_inverse=True)
    return score - (np.bincount(group, score) / np.bincount(group))[group]


@node(role="actor", type="train", writes=(), balance="tokens")
def update(batch, ctx):
    """In place of a training step, which wants the same number of tokens on every worker."""
    ctx.metrics.log("reward/mean", float(np.mean(batch["correct"])), len(batch))
    ctx.metrics.log("response_length/mean", float(np.mean(batch["tokens"].lengths)), len(batch))


@flow
def diamond(data):
    rollout = generate(data["question"])
    right = correct(rollout["answer"], data["solution"])
    brief = brevity(rollout["tokens"])
    better = advantage(right, brief)
    update(rollout["tokens"], right, better)
