"""GRPO: the advantage of a response is relative to the others to its prompt (arXiv 2402.03300)."""

from distflow.flow import flow
from distflow.flows.nodes import group_advantage
from distflow.flows.policy_update import update_policy


@flow(constants_of=update_policy)
def grpo(prompts, actor, reference, reward, *, scale="std", clip=0.2, clip_high=None, **rest):
    rollout = actor.generate(prompts["prompt"])
    score = reward.score(prompts, rollout)
    advantage = group_advantage(score, scale=scale)  # (score − mean of the group) / its standard deviation
    update_policy(actor, reference, rollout, advantage, loss="policy", clip=clip, clip_high=clip_high, **rest)
