"""REINFORCE++: token returns whitened over the batch, with a KL penalty in the reward; no critic (arXiv 2501.03262)."""

from distflow.flow import flow
from distflow.flows.nodes import discounted_returns, whiten_over_batch
from distflow.flows.policy_update import update_policy


@flow(constants_of=update_policy)
def reinforce_pp(prompts, actor, reference, reward, *, gamma=1.0, kl_in_reward=0.0, clip=0.2, **rest):
    rollout = actor.generate(prompts["prompt"])
    score = reward.score(prompts, rollout)
    ref = [reference.logprobs(rollout["prompt_tokens", "response_tokens"])] if kl_in_reward else []
    returns = discounted_returns(score, rollout["rollout_logprobs"], *ref, gamma=gamma, kl=kl_in_reward)
    advantage = whiten_over_batch(returns)
    update_policy(actor, reference, rollout, advantage, *ref, loss="policy", clip=clip, **rest)
