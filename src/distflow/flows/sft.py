"""SFT: supervised fine-tuning on given responses."""

from distflow.algo.options import Aggregation
from distflow.flow import flow


@flow
def sft(data, actor, *, aggregate: Aggregation = "token-mean", mini_batches=1, epochs=1):
    tokens = actor.encode(data["prompt", "response"])
    actor.update(tokens, loss="nll", aggregate=aggregate, mini_batches=mini_batches, epochs=epochs)
