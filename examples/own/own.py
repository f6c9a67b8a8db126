"""Many digits, but not always the same one: nodes, a role with state, a loss, and flows of them."""

import torch

from distflow import Role, flow, node
from distflow.algo.losses import with_kl_and_entropy
from distflow.batch.branches import branches_column
from distflow.flows.nodes import group_advantage, kl_divergence
from distflow.flows.policy_update import update_policy


@node
def distinct(batch):
    """A second reward: the share of distinct characters."""
    return [len(set(response)) / max(1, len(response)) for response in batch["response"]]


@node(whole_groups=True)
def scores_differ(batch, min_range=0.2):
    """A filter: if all responses to a prompt score about the same, there is little to learn from them."""
    keep = torch.zeros(len(batch), dtype=torch.bool)
    for prompt in set(batch.groups):
        group = batch.groups == prompt
        keep[group] = batch["score"][group].max() - batch["score"][group].min() >= min_range
    return keep


@node(whole_groups=True)
def advantage(batch, ctx, distinct_weight=0.5, bonus_weight=0.5):
    """The sum of the rewards, less the median of the group."""
    total = batch["score"] + distinct_weight * batch["distinct"] + bonus_weight * batch["bonus"]
    advantage = torch.zeros(len(batch))
    for prompt in set(batch.groups):
        group = batch.groups == prompt
        advantage[group] = total[group] - total[group].median()
    ctx.metrics.log("own/distinct", float(batch["distinct"].mean()), len(batch))
    return advantage


class Judge(Role):
    """Gives a bonus to scores above their running mean."""

    def __init__(self, rate=0.2):
        self.rate, self.mean = rate, 0.0

    @node(writes="bonus", whole_batch=True)
    def bonus(self, batch, ctx):
        bonus = (batch["score"] > self.mean).float()
        self.mean += self.rate * (float(batch["score"].mean()) - self.mean)
        ctx.metrics.log("own/running_mean", self.mean)
        return bonus

    def state(self):
        return {"mean": self.mean}

    def restore(self, state):
        self.mean = state["mean"]


def my_loss(tokens, negative_weight=0.5, **rest):
    """The policy gradient, with a smaller weight for negative advantages."""
    advantage = tokens["advantage"]
    weight = torch.where(advantage > 0, advantage, negative_weight * advantage)
    return with_kl_and_entropy(tokens, -weight * tokens.logprobs, {"own/weight": weight.abs()}, **rest)


@flow(constants_of=update_policy)
def own(
    prompts, actor, reference, reward, judge, *, distinct_weight=0.5, negative_weight=0.5, max_gen_batches=4, **rest
):
    rollout = actor.generate(prompts["prompt"])
    score = reward.score(prompts, rollout)
    scores_differ(score, dynamic_sampling=max_gen_batches)  # generates more until 8 prompts pass, at most 4 × 8
    variety = distinct(rollout["response"])
    bonus = judge.bonus(score)
    combined = advantage(score, variety, bonus, distinct_weight=distinct_weight)
    update_policy(actor, reference, rollout, combined, loss="own.py:my_loss", negative_weight=negative_weight, **rest)


@node(writes="response_branches")
def halves(batch):
    """Makes two sequences of each response."""
    rows = []
    for prompt, response in zip(batch["prompt_tokens"], batch["response_tokens"], strict=True):
        half = len(response) // 2
        rows.append([(half, 0, len(prompt) + half)] if half else [])  # first token, parent, tokens it shares with that
    return branches_column(rows)


@flow(constants_of=update_policy)
def in_halves(prompts, actor, reference, reward, **rest):
    rollout = actor.generate(prompts["prompt"])
    score = reward.score(prompts, rollout)
    halves(rollout["prompt_tokens", "response_tokens"])
    update_policy(actor, reference, rollout, group_advantage(score), loss="policy", **rest)


@flow(constants_of=update_policy)
def adaptive_kl(prompts, actor, reference, reward, control, *, kl=1.0, **rest):
    rollout = actor.generate(prompts["prompt"])
    score = reward.score(prompts, rollout)
    ref = reference.logprobs(rollout["prompt_tokens", "response_tokens"])
    kl_weight = control.weight(kl_divergence(rollout["rollout_logprobs"], ref))
    advantage = group_advantage(score)
    update_policy(actor, reference, rollout, advantage, ref, kl_weight, loss="policy", kl=kl, **rest)
