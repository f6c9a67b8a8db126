"""The policy update that the built-in RL flows end with."""

from distflow.algo.options import (
    AggregateBy,
    Aggregation,
    CorrectionKind,
    Estimator,
    Fraction,
    KLReference,
    NonNegative,
    RejectionKind,
    Share,
    Threshold,
)


def update_policy(
    actor,
    reference,
    rollout,
    *fields,
    loss,
    aggregate: Aggregation = "token-mean",  # how token losses become one loss; see distflow.algo.aggregate
    aggregate_by: AggregateBy = "sample",  # what `seq-mean-…` is the mean over, where a sample has several histories
    kl=0.0,  # weight of the KL divergence from the reference model; at 0 there is no reference model
    kl_estimator: Estimator = "k3",
    kl_unbiased=False,  # multiplies it by the importance ratio
    kl_reference: KLReference = "reference",  # or the moving average of the weights (train.ema)
    entropy=0.0,  # weight of the entropy bonus
    entropy_target: NonNegative | None = None,  # mean entropy up to which there is a bonus, whose weight adapts to it
    entropy_step: NonNegative = 0.005,  # by which the weight changes after an update
    entropy_max: NonNegative = 1.0,  # the highest weight
    recompute_old_logprobs=False,  # by the trainer, instead of the rollout engine's
    rollout_correction: CorrectionKind | None = None,  # of rollouts by another policy; see distflow.algo.correction
    correction_threshold: Threshold = 2.0,
    correction_lower: Fraction | None = None,  # default: 0 for the kinds that clamp, else 1/threshold
    rollout_rejection: RejectionKind | None = None,  # of tokens or responses; see distflow.algo.correction
    rejection_threshold: NonNegative = 2.0,
    mask_truncated=False,  # leaves out responses that were cut off at rollout.max_tokens
    mask_off_policy: NonNegative | None = None,  # KL above which responses with a negative advantage are left out
    top_entropy: Share = 1.0,  # fraction of the tokens, those with the highest entropy, that have a policy term
    mini_batches=1,
    epochs=1,
    **constants,  # of the loss
):
    """Updates the actor on a rollout. `fields` are further inputs of the loss: the advantage, reference log-probs, …"""
    tokens = rollout["prompt_tokens", "response_tokens"]
    inputs = [tokens, rollout["rollout_logprobs"], *fields]
    names = {name for value in fields for name in value.fields}
    if aggregate_by != "sample":
        constants["aggregate_by"] = aggregate_by
    if rollout_correction:
        constants |= {
            "rollout_correction": rollout_correction,
            "correction_threshold": correction_threshold,
            "correction_lower": correction_lower,
        }
    if rollout_rejection:
        constants |= {"rollout_rejection": rollout_rejection, "rejection_threshold": rejection_threshold}
    if mask_truncated:
        inputs.append(rollout["finished"])
        constants["mask_truncated"] = True
    if mask_off_policy is not None:
        constants["mask_off_policy"] = mask_off_policy
    if top_entropy < 1:
        inputs.append(actor.entropy(tokens))
        constants["top_entropy"] = top_entropy
    if entropy_target is not None:
        constants |= {"entropy_target": entropy_target, "entropy_step": entropy_step, "entropy_max": entropy_max}
    if kl_unbiased:
        constants["kl_unbiased"] = True
    several_updates = (mini_batches, epochs) != (1, 1)  # in one step; values are checked after tracing
    if "old_logprobs" not in names:
        if recompute_old_logprobs or ((rollout_correction or rollout_rejection) and several_updates):
            inputs.append(actor.logprobs(tokens))
        elif several_updates:
            constants["old_logprobs"] = "rollout_logprobs"
    if kl and kl_reference == "ema":
        inputs.append(actor.ema_logprobs(tokens))
    elif kl and "ref_logprobs" not in names:
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
