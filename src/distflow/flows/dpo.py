"""DPO: makes the preferred one of two given responses likelier; no reward, no rollout (arXiv 2305.18290)."""

from distflow.algo.options import PreferenceKind, Smoothing
from distflow.flow import flow


@flow
def dpo(
    pairs,
    actor,
    reference,
    *,
    beta=0.1,
    label_smoothing: Smoothing = 0.0,
    kind: PreferenceKind = "sigmoid",
    mini_batches=1,
    epochs=1,
):
    tokens = actor.encode_pair(pairs["prompt", "chosen", "rejected"])
    ref = reference.logprobs(tokens["prompt_tokens", "response_tokens"])
    constants = {"beta": beta, "label_smoothing": label_smoothing, "kind": kind}
    updates = {"mini_batches": mini_batches, "epochs": epochs}
    actor.update_pairs(tokens, ref, loss="dpo", aggregate="seq-mean-token-sum", **constants, **updates)
