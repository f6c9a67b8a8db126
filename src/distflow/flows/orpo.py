"""ORPO: fine-tuning on the preferred response and odds against the other; no reference model (arXiv 2403.07691)."""

from distflow.flow import flow


@flow
def orpo(pairs, actor, *, beta=0.1, mini_batches=1, epochs=1):
    tokens = actor.encode_pair(pairs["prompt", "chosen", "rejected"])
    updates = {"mini_batches": mini_batches, "epochs": epochs}
    actor.update_pairs(tokens, loss="orpo", aggregate="seq-mean-token-sum", beta=beta, **updates)
