"""Clip-Cov: GRPO that leaves out a few tokens whose log-prob and advantage covary much (arXiv 2505.22617)."""

from distflow.algo.options import Share
from distflow.flow import flow
from distflow.flows.nodes import group_advantage
from distflow.flows.policy_update import update_policy


@flow(constants_of=update_policy)
def clip_cov(
    prompts,
    actor,
    reference,
    reward,
    *,
    share: Share = 2e-4,  # of the tokens of a step, drawn from those with a covariance between `low` and `high`
    low=1.0,
    high=5.0,
    clip=0.2,
    dual_clip=3.0,
    **rest,
):
    rollout = actor.generate(prompts["prompt"])
    score = reward.score(prompts, rollout)
    advantage = group_advantage(score)
    chosen = {"share": share, "low": low, "high": high}
    clips = {"clip": clip, "dual_clip": dual_clip}
    update_policy(actor, reference, rollout, advantage, loss="policy", clip_cov=chosen, **clips, **rest)
