"""GRPO: several responses to a prompt, each judged against the others (arXiv 2402.03300)."""

from distflow.flow import flow
from distflow.flows.nodes import group_advantage


@flow
def grpo(
    prompts,
    actor,
    reference,
    reward,
    *,
    scale="std",  # of advantages; "none" leaves them as differences of scores
    clip=0.2,
    clip_high=None,
    kl=0.0,  # weight of the divergence from the reference model; at 0 there is none
    kl_kind="k3",
    entropy=0.0,  # weight of the entropy bonus
    aggregate="token-mean",
    recompute_old=False,  # old log-probs by the trainer instead of the rollout engine
    mini_batches=1,
    epochs=1,
):
    rollout = actor.generate(prompts["prompt"])
    score = reward.score(prompts, rollout["response", "response_tokens"])
    tokens = rollout["prompt_tokens", "response_tokens"]
    seen = [tokens, rollout["rollout_logprobs"], group_advantage(score, scale=scale)]
    if recompute_old:
        seen.append(actor.logprobs(tokens))
    if kl:
        seen.append(reference.logprobs(tokens))
    actor.update(
        *seen,
        loss="distflow.algo.losses:policy",
        aggregate=aggregate,
        mini_batches=mini_batches,
        epochs=epochs,
        clip=clip,
        clip_high=clip_high,
        kl=kl,
        kl_kind=kl_kind,
        entropy=entropy,
    )
