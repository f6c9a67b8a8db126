"""PPO: token advantages from a critic (GAE), and a clipped importance ratio (arXiv 1707.06347)."""

from distflow.flow import flow
from distflow.flows.nodes import gae, whiten_over_batch
from distflow.flows.policy_update import update_policy


@flow(constants_of=update_policy)
def ppo(
    prompts,
    actor,
    critic,
    reference,
    reward,
    *,
    gamma=1.0,
    lam=0.95,
    clip=0.2,
    dual_clip=3.0,
    clip_value=0.2,
    kl_in_reward=0.0,  # weight of the KL penalty, token by token, in the reward
    recompute_old_logprobs=False,
    mini_batches=1,
    epochs=1,
    **rest,
):
    rollout = actor.generate(prompts["prompt"])
    tokens = rollout["prompt_tokens", "response_tokens"]
    score = reward.score(prompts, rollout)
    old = [actor.logprobs(tokens)] if recompute_old_logprobs else []
    ref = [reference.logprobs(tokens)] if kl_in_reward else []
    penalty = [*(old or [rollout["rollout_logprobs"]]), *ref] if kl_in_reward else []
    values = critic.values(tokens)
    estimates = gae(score, values, *penalty, gamma=gamma, lam=lam, kl=kl_in_reward)
    updates = {"mini_batches": mini_batches, "epochs": epochs}
    critic.update(tokens, values, estimates["returns"], clip=clip_value, **updates)
    advantage = whiten_over_batch(estimates)
    clips = {"clip": clip, "dual_clip": dual_clip}
    update_policy(actor, reference, rollout, advantage, *old, *ref, loss="policy", **clips, **updates, **rest)
