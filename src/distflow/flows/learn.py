"""How flows of the policy-gradient family end: one update of the actor on what was generated and judged."""


def learn(
    actor,
    reference,
    said,
    *judged,
    loss,
    aggregate="token-mean",  # how token losses become one number; see distflow.algo.aggregate
    kl=0.0,  # weight of the divergence from the reference model; at 0 there is none
    kl_kind="k3",
    entropy=0.0,  # weight of the entropy bonus
    recompute_old=False,  # old log-probs by the trainer instead of the rollout engine
    correct=None,  # for the rollout engine not being quite the trainer: token, sequence, mask-token, mask-sequence
    correct_limit=2.0,
    mini_batches=1,
    epochs=1,
    **constants,  # of the loss
):
    tokens = said["prompt_tokens", "response_tokens"]
    seen = [tokens, said["rollout_logprobs"], *judged]
    if recompute_old or (correct and mini_batches * epochs > 1):
        seen.append(actor.logprobs(tokens))
    if kl and not any("ref_logprobs" in value.fields for value in judged):
        seen.append(reference.logprobs(tokens))
    actor.update(
        *seen,
        loss=loss,
        aggregate=aggregate,
        mini_batches=mini_batches,
        epochs=epochs,
        kl=kl,
        kl_kind=kl_kind,
        entropy=entropy,
        **({"correct": correct, "correct_limit": correct_limit} if correct else {}),
        **constants,
    )
