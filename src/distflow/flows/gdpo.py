"""GDPO: each of several rewards is normalised in its group, then they are added up (arXiv 2601.05242)."""

from distflow.flow import flow
from distflow.flows.nodes import summed_advantage
from distflow.flows.policy_update import update_policy


@flow(constants_of=update_policy)
def gdpo(prompts, actor, reference, reward, *, clip=0.2, dual_clip=3.0, **rest):
    rollout = actor.generate(prompts["prompt"])
    score = reward.score_each(prompts, rollout)
    advantage = summed_advantage(score)
    update_policy(actor, reference, rollout, advantage, loss="policy", clip=clip, dual_clip=dual_clip, **rest)
