"""SAPO: a sigmoid of the importance ratio in place of a clip (arXiv 2511.20347)."""

from distflow.flow import flow
from distflow.flows.nodes import group_advantage
from distflow.flows.policy_update import update_policy


@flow(constants_of=update_policy)
def sapo(prompts, actor, reference, reward, *, tau=1.0, tau_negative=1.05, **rest):
    rollout = actor.generate(prompts["prompt"])
    score = reward.score(prompts, rollout)
    advantage = group_advantage(score)
    update_policy(actor, reference, rollout, advantage, loss="sapo", tau=tau, tau_negative=tau_negative, **rest)
