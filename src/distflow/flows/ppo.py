"""PPO: a critic tells what each token was worth; clipped ratios keep close to the old policy (arXiv 1707.06347)."""

from distflow.flow import flow
from distflow.flows.learn import learn
from distflow.flows.nodes import gae, whitened


@flow(also=learn)
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
    clip_value=0.2,
    kl_reward=0.0,  # what a divergence of 1 from the reference costs, token by token
    mini_batches=1,
    epochs=1,
    **rest,
):
    said = actor.generate(prompts["prompt"])
    tokens = said["prompt_tokens", "response_tokens"]
    score = reward.score(prompts, said)
    ref = [said["rollout_logprobs"], reference.logprobs(tokens)] if kl_reward else []
    values = critic.values(tokens)
    gained = gae(score, values, *ref, gamma=gamma, lam=lam, kl=kl_reward)
    critic.update(tokens, values, gained["returns"], clip=clip_value, mini_batches=mini_batches, epochs=epochs)
    advantage = whitened(gained)
    several = {"mini_batches": mini_batches, "epochs": epochs}
    learn(actor, reference, said, advantage, *ref[1:], loss="policy", clip=clip, **several, **rest)
