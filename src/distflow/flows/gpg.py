"""GPG: the plain policy gradient on group-relative scores, without ratio, clip or reference (arXiv 2504.02546)."""

from distflow.flow import flow
from distflow.flows.nodes import batch_advantage
from distflow.flows.policy_update import update_policy


@flow(constants_of=update_policy)
def gpg(prompts, actor, reference, reward, **rest):
    rollout = actor.generate(prompts["prompt"])
    score = reward.score(prompts, rollout)
    advantage = batch_advantage(score, scale="nonzero_std")  # compensates for groups whose scores are all equal
    update_policy(actor, reference, rollout, advantage, loss="reinforce", **rest)
