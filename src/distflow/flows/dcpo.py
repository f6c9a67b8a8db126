"""DCPO's clip: bounds of a token's ratio that are the wider the rarer the token was (arXiv 2509.02333)."""

from distflow.flow import flow
from distflow.flows.nodes import group_advantage
from distflow.flows.policy_update import update_policy


@flow(constants_of=update_policy)
def dcpo(
    prompts,
    actor,
    reference,
    reward,
    *,
    clip=0.16,
    clip_high=0.2,
    dual_clip=10.0,
    aggregate="seq-mean-token-mean",
    **rest,
):
    rollout = actor.generate(prompts["prompt"])
    score = reward.score(prompts, rollout)
    advantage = group_advantage(score)
    clips = {"clip": clip, "clip_high": clip_high, "dual_clip": dual_clip}
    update_policy(actor, reference, rollout, advantage, loss="dcpo", aggregate=aggregate, **clips, **rest)
