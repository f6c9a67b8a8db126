"""KL-Cov: a penalty on tokens whose log-prob and advantage covary most, in place of a clip (arXiv 2505.22617)."""

from distflow.algo.options import NonNegative, Share
from distflow.flow import flow
from distflow.flows.nodes import group_advantage
from distflow.flows.policy_update import update_policy


@flow(constants_of=update_policy)
def kl_cov(prompts, actor, reference, reward, *, share: Share = 2e-4, penalty: NonNegative = 1.0, **rest):
    rollout = actor.generate(prompts["prompt"])
    score = reward.score(prompts, rollout)
    advantage = group_advantage(score)
    update_policy(actor, reference, rollout, advantage, loss="kl_cov", kl_cov=share, penalty=penalty, **rest)
