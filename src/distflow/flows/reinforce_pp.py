"""REINFORCE++: token returns whitened over the batch, with a KL penalty in the reward; no critic (arXiv 2501.03262)."""

from distflow.flow import flow
from distflow.flows.nodes import discounted_returns, whiten_over_batch
from distflow.flows.policy_update import update_policy


@flow(constants_of=update_policy)
def reinforce_pp(
    prompts,
    actor,
    reference,
    reward,
    *,
    gamma=1.0,
    clip=0.2,
    dual_clip=3.0,
    kl_in_reward=0.0,  # weight of the KL penalty, token by token, in the reward
    recompute_old_logprobs=False,
    **rest,
):
    rollout = actor.generate(prompts["prompt"])
    tokens = rollout["prompt_tokens", "response_tokens"]
    score = reward.score(prompts, rollout)
    old = [actor.logprobs(tokens)] if recompute_old_logprobs else []
    ref = [reference.logprobs(tokens)] if kl_in_reward else []
    penalty = [*old, *ref] if kl_in_reward else []
    inputs = [score, rollout["rollout_logprobs"], *penalty]
    returns = discounted_returns(*inputs, gamma=gamma, kl=kl_in_reward)
    advantage = whiten_over_batch(returns)
    clips = {"clip": clip, "dual_clip": dual_clip}
    update_policy(actor, reference, rollout, advantage, *old, *ref, loss="policy", **clips, **rest)
