"""DPPO: bounds on the change of a token's probability in place of its ratio (arXiv 2602.04879)."""

from distflow.flow import flow
from distflow.flows.nodes import group_advantage
from distflow.flows.policy_update import update_policy


@flow(constants_of=update_policy)
def dppo(prompts, actor, reference, reward, *, clip=0.2, clip_high: float | None = None, **rest):
    rollout = actor.generate(prompts["prompt"])
    score = reward.score(prompts, rollout)
    advantage = group_advantage(score)
    update_policy(actor, reference, rollout, advantage, loss="dppo", clip=clip, clip_high=clip_high, **rest)
