"""Trains a reward model to score the preferred one of two given responses higher (Bradley–Terry)."""

from distflow.algo.options import NonNegative
from distflow.flow import flow
from distflow.flows.nodes import wanted_margin


@flow
def reward_model(pairs, reward_model, *, centre: NonNegative = 0.0, mini_batches=1, epochs=1):
    tokens = reward_model.encode_pair(pairs["prompt", "chosen", "rejected"])
    margin = [wanted_margin(pairs["margin"])] if "margin" in pairs.fields else []
    updates = {"mini_batches": mini_batches, "epochs": epochs}
    reward_model.update_pairs(tokens, *margin, aggregate="seq-mean-token-sum", centre=centre, **updates)
