"""RLOO: the baseline is the mean score of the *other* responses to the prompt (arXiv 2402.14740)."""

from distflow.flow import flow
from distflow.flows.nodes import group_advantage
from distflow.flows.policy_update import update_policy


@flow(constants_of=update_policy)
def rloo(prompts, actor, reference, reward, *, clip=0.2, dual_clip=3.0, aggregate="seq-mean-token-sum", **rest):
    rollout = actor.generate(prompts["prompt"])
    score = reward.score(prompts, rollout)
    advantage = group_advantage(score, baseline="leave_one_out", scale="none")
    constants = {"clip": clip, "dual_clip": dual_clip, "aggregate": aggregate}
    update_policy(actor, reference, rollout, advantage, loss="policy", **constants, **rest)
