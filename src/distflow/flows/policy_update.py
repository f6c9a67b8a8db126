"""The policy update that the built-in RL flows end with."""


def update_policy(
    actor,
    reference,
    rollout,
    *fields,
    loss,
    aggregate="token-mean",  # how token losses become one loss; see distflow.algo.aggregate
    kl=0.0,  # weight of the KL divergence from the reference model; at 0 there is no reference model
    kl_estimator="k3",
    entropy=0.0,  # weight of the entropy bonus
    recompute_old_logprobs=False,  # with the trainer, instead of those of the rollout engine
    rollout_correction=None,  # of the mismatch with the rollout engine; see distflow.algo.correction
    correction_threshold=2.0,
    mini_batches=1,
    epochs=1,
    **constants,  # of the loss
):
    """Updates the actor on a rollout. `fields` are what else the loss reads: the advantage, reference log-probs, …"""
    tokens = rollout["prompt_tokens", "response_tokens"]
    inputs = [tokens, rollout["rollout_logprobs"], *fields]
    names = {name for value in fields for name in value.fields}
    if rollout_correction:
        constants |= {"rollout_correction": rollout_correction, "correction_threshold": correction_threshold}
    several_updates = (mini_batches, epochs) != (1, 1)  # in one step; values are checked after tracing
    if recompute_old_logprobs or (rollout_correction and several_updates):
        inputs.append(actor.logprobs(tokens))
    elif several_updates and "old_logprobs" not in names:
        constants["old_logprobs"] = "rollout_logprobs"
    if kl and "ref_logprobs" not in names:
        inputs.append(reference.logprobs(tokens))
    actor.update(
        *inputs,
        loss=loss,
        aggregate=aggregate,
        mini_batches=mini_batches,
        epochs=epochs,
        kl=kl,
        kl_estimator=kl_estimator,
        entropy=entropy,
        **constants,
    )
