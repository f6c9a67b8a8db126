"""The policy update that the built-in RL flows end with."""

from distflow.algo.options import Aggregation, CorrectionKind, Estimator, Fraction, Threshold
from distflow.flows.nodes import response_mask


def update_policy(
    actor,
    reference,
    rollout,
    *fields,
    loss,
    aggregate: Aggregation = "token-mean",  # how token losses become one loss; see distflow.algo.aggregate
    kl=0.0,  # weight of the KL divergence from the reference model; at 0 there is no reference model
    kl_estimator: Estimator = "k3",
    entropy=0.0,  # weight of the entropy bonus
    recompute_old_logprobs=False,  # by the trainer, instead of the rollout engine's
    rollout_correction: CorrectionKind | None = None,  # of rollouts by another policy; see distflow.algo.correction
    correction_threshold: Threshold = 2.0,
    correction_lower: Fraction | None = None,  # default: 0 for the kinds that clamp, else 1/threshold
    mini_batches=1,
    epochs=1,
    **constants,  # of the loss
):
    """Updates the actor on a rollout. `fields` are further inputs of the loss: the advantage, reference log-probs, …"""
    tokens = [rollout["prompt_tokens", "response_tokens"], *response_mask(rollout)]
    inputs = [*tokens, rollout["rollout_logprobs"], *fields]
    names = {name for value in fields for name in value.fields}
    if rollout_correction:
        constants |= {
            "rollout_correction": rollout_correction,
            "correction_threshold": correction_threshold,
            "correction_lower": correction_lower,
        }
    several_updates = (mini_batches, epochs) != (1, 1)  # in one step; values are checked after tracing
    if "old_logprobs" not in names:
        if recompute_old_logprobs or (rollout_correction and several_updates):
            inputs.append(actor.logprobs(*tokens))
        elif several_updates:
            constants["old_logprobs"] = "rollout_logprobs"
    if kl and "ref_logprobs" not in names:
        inputs.append(reference.logprobs(*tokens))
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
