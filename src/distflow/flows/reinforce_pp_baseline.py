"""REINFORCE++-baseline: scores less the group mean, whitened over the batch (arXiv 2501.03262)."""

from distflow.flow import flow
from distflow.flows.nodes import batch_advantage
from distflow.flows.policy_update import update_policy


@flow(constants_of=update_policy)
def reinforce_pp_baseline(prompts, actor, reference, reward, *, clip=0.2, dual_clip=3.0, kl_estimator="k2", **rest):
    rollout = actor.generate(prompts["prompt"])
    score = reward.score(prompts, rollout)
    advantage = batch_advantage(score, scale="batch")
    constants = {"clip": clip, "dual_clip": dual_clip, "kl_estimator": kl_estimator}
    update_policy(actor, reference, rollout, advantage, loss="policy", **constants, **rest)
