"""Train a reward model: of two given responses, the preferred one is to get the higher score (Bradley–Terry)."""

from distflow.flow import flow


@flow
def reward_model(pairs, reward_model, *, mini_batches=1, epochs=1):
    tokens = reward_model.encode_pair(pairs["prompt", "chosen", "rejected"])
    reward_model.update_pairs(tokens, aggregate="seq-mean-token-sum", mini_batches=mini_batches, epochs=epochs)
