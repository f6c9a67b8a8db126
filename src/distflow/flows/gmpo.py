"""GMPO: the geometric mean of the clipped ratios of a response (arXiv 2507.20673)."""

from distflow.flow import flow
from distflow.flows.nodes import group_advantage
from distflow.flows.policy_update import update_policy


@flow(constants_of=update_policy)
def gmpo(prompts, actor, reference, reward, *, clip=0.4, aggregate="seq-mean-token-mean", **rest):
    rollout = actor.generate(prompts["prompt"])
    score = reward.score(prompts, rollout)
    advantage = group_advantage(score)
    update_policy(actor, reference, rollout, advantage, loss="gmpo", clip=clip, aggregate=aggregate, **rest)
