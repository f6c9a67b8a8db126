"""CPGD: clipped log-ratios in place of ratios, and a penalty for policy drift (arXiv 2505.12504)."""

from distflow.flow import flow
from distflow.flows.nodes import group_advantage
from distflow.flows.policy_update import update_policy


@flow(constants_of=update_policy)
def cpgd(prompts, actor, reference, reward, *, clip=0.2, drift=0.001, **rest):
    rollout = actor.generate(prompts["prompt"])
    score = reward.score(prompts, rollout)
    advantage = group_advantage(score)
    update_policy(actor, reference, rollout, advantage, loss="cpgd", clip=clip, drift=drift, **rest)
