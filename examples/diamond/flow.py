"""A flow in the shape of GRPO, of plain functions: sums are answered without a model and scored twice, in parallel.

                  ┌─ correct ─┐
data ─ generate ──┤           ├── advantage ── update
                  └─ brevity ─┘
"""

import numpy as np

from distflow import flow, node


@node(role="rollout", type="inference", writes=["answer", "tokens"])
def generate(batch, ctx, error_rate=0.4):
    """Stands in for a model: some answers are wrong, lengths vary. The noise depends on the sample only."""
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
    """Subtracts the mean score of the group, so all answers to a question must be on one worker."""
    score = (batch["correct"] + batch["brevity"]).numpy()
    _, group = np.unique(batch.groups, return_inverse=True)
    return score - (np.bincount(group, score) / np.bincount(group))[group]


@node(role="actor", type="train", writes=(), balance="tokens")
def update(batch, ctx):
    """Stands in for a training step, which needs about the same number of tokens on every worker."""
    ctx.metrics.log("reward/mean", float(batch["correct"].mean()), len(batch))
    ctx.metrics.log("response_length/mean", float(np.mean(batch["tokens"].lengths)), len(batch))


@flow
def diamond(data):
    rollout = generate(data["question"])
    accuracy = correct(rollout["answer"], data["solution"])
    penalty = brevity(rollout["tokens"])
    update(rollout["tokens"], accuracy, advantage(accuracy, penalty))
