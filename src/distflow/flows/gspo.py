"""GSPO: GRPO with one importance ratio per response instead of one per token (arXiv 2507.18071)."""

from distflow.flow import flow
from distflow.flows.nodes import group_advantage
from distflow.flows.policy_update import update_policy


@flow(constants_of=update_policy)
def gspo(
    prompts,
    actor,
    reference,
    reward,
    *,
    clip=3e-4,
    clip_high=4e-4,
    dual_clip=3.0,
    aggregate="seq-mean-token-mean",
    **rest,
):
    rollout = actor.generate(prompts["prompt"])
    score = reward.score(prompts, rollout)
    advantage = group_advantage(score)
    constants = {"clip": clip, "clip_high": clip_high, "dual_clip": dual_clip, "aggregate": aggregate}
    update_policy(actor, reference, rollout, advantage, loss="gspo", **constants, **rest)
