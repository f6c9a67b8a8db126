"""KTO: responses that are each labelled good or bad, without pairs (arXiv 2402.01306)."""

from distflow.algo.options import NonNegative, Positive
from distflow.flow import flow
from distflow.flows.nodes import desirable, kl_baseline, mismatched, mismatched_log_ratio


@flow
def kto(
    data,
    actor,
    reference,
    *,
    beta: Positive = 0.1,
    desirable_weight: NonNegative = 1.0,
    undesirable_weight: NonNegative = 1.0,
    mini_batches=1,
    epochs=1,
):
    tokens = actor.encode(data["prompt", "response"])
    # The divergence from the reference is estimated on responses to other prompts.
    others = actor.encode(data["prompt"], mismatched(data["response"]), prefix="mismatched_")
    ours = actor.logprobs(others, prefix="mismatched_")
    baseline = kl_baseline(mismatched_log_ratio(ours, reference.logprobs(others, prefix="mismatched_")))
    weights = {"desirable_weight": desirable_weight, "undesirable_weight": undesirable_weight}
    inputs = tokens, reference.logprobs(tokens), desirable(data["label"]), baseline
    updates = {"mini_batches": mini_batches, "epochs": epochs}
    actor.update(*inputs, loss="kto", aggregate="seq-mean-token-sum", beta=beta, **weights, **updates)
