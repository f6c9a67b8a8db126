"""GRPO: the advantage of a response is relative to the others to its prompt (arXiv 2402.03300)."""

from distflow.algo.options import GroupScale
from distflow.flow import flow
from distflow.flows.nodes import group_advantage
from distflow.flows.policy_update import update_policy


@flow(constants_of=update_policy)
def grpo(
    prompts,
    actor,
    reference,
    reward,
    *,
    scale: GroupScale = "std",
    clip=0.2,
    clip_high: float | None = None,
    dual_clip=3.0,
    **rest,
):
    rollout = actor.generate(prompts["prompt"])
    score = reward.score(prompts, rollout)
    advantage = group_advantage(score, scale=scale)  # (score − mean of the group) / its standard deviation
    clips = {"clip": clip, "clip_high": clip_high, "dual_clip": dual_clip}
    update_policy(actor, reference, rollout, advantage, loss="policy", **clips, **rest)
