"""OTB: the baseline of a token is that of its place in the group, weighed by the energy so far (arXiv 2602.07078)."""

from distflow.flow import flow
from distflow.flows.nodes import optimal_token_advantage
from distflow.flows.policy_update import update_policy


@flow(constants_of=update_policy)
def otb(prompts, actor, reference, reward, *, clip=0.2, dual_clip=3.0, **rest):
    rollout = actor.generate(prompts["prompt"])
    score = reward.score(prompts, rollout)
    energy = actor.energy(rollout["prompt_tokens", "response_tokens"])
    advantage = optimal_token_advantage(score, energy)
    update_policy(actor, reference, rollout, advantage, loss="policy", clip=clip, dual_clip=dual_clip, **rest)
