"""OPO: exactly on-policy, with the length-weighted baseline, which minimises variance (arXiv 2505.23585)."""

from distflow.flow import flow
from distflow.flows.nodes import length_advantage
from distflow.flows.policy_update import update_policy


@flow(constants_of=update_policy)
def opo(prompts, actor, reference, reward, *, aggregate="seq-mean-token-sum-norm", **rest):
    rollout = actor.generate(prompts["prompt"])
    score = reward.score(prompts, rollout)
    advantage = length_advantage(score, rollout["response_tokens"], baseline="length_weighted", scale="none")
    update_policy(actor, reference, rollout, advantage, loss="reinforce", aggregate=aggregate, **rest)
