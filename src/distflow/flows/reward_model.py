"""Trains a reward model to score the preferred one of two given responses higher (Bradley–Terry)."""

from distflow.flow import flow


@flow
def reward_model(pairs, reward_model, *, mini_batches=1, epochs=1):
    tokens = reward_model.encode_pair(pairs["prompt", "chosen", "rejected"])
    reward_model.update_pairs(tokens, aggregate="seq-mean-token-sum", mini_batches=mini_batches, epochs=epochs)
