"""Dr. GRPO: GRPO without its biases towards easy prompts and long wrong responses (arXiv 2503.20783)."""

from distflow.flow import flow
from distflow.flows.nodes import group_advantage
from distflow.flows.policy_update import update_policy


@flow(constants_of=update_policy)
def dr_grpo(prompts, actor, reference, reward, *, clip=0.2, dual_clip=3.0, aggregate="seq-mean-token-sum-norm", **rest):
    rollout = actor.generate(prompts["prompt"])
    score = reward.score(prompts, rollout)
    advantage = group_advantage(score, scale="none")  # not divided by the standard deviation
    constants = {"clip": clip, "dual_clip": dual_clip, "aggregate": aggregate}
    update_policy(actor, reference, rollout, advantage, loss="policy", **constants, **rest)
