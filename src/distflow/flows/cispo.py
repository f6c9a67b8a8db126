"""CISPO: clipped importance ratios are only weights, so that every token keeps its gradient (arXiv 2506.13585)."""

from distflow.flow import flow
from distflow.flows.nodes import group_advantage
from distflow.flows.policy_update import update_policy


@flow(constants_of=update_policy)
def cispo(prompts, actor, reference, reward, *, clip=1.0, clip_high=0.2, **rest):
    rollout = actor.generate(prompts["prompt"])
    score = reward.score(prompts, rollout)
    advantage = group_advantage(score)
    update_policy(actor, reference, rollout, advantage, loss="cispo", clip=clip, clip_high=clip_high, **rest)
