"""The roles that have a model, as flows see them. Importing this imports no torch: flows are planned without it."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from distflow.engine.setup import Setup
from distflow.flow.call import load
from distflow.flow.trace import node

if TYPE_CHECKING:
    from pathlib import Path

    from distflow.algo.aggregate import Mode
    from distflow.data.batch import Batch, Ragged
    from distflow.data.exchange import Collective
    from distflow.worker import Context

TOKENS = ("prompt_tokens", "response_tokens")


class Actor:
    """The policy: generates, tells log-probs, learns. `generate` may have another layout than the rest."""

    def __init__(self, setup: Setup) -> None:
        from distflow.engine.policy import Policy

        self.policy = Policy(setup)

    def hand_over(self) -> "Iterator[Collective]":
        """The newest weights to where responses are generated."""
        return self.policy.hand_over()

    def save(self, folder: "Path", step: int) -> None:
        """The weights, each worker its part."""
        self.policy.save(folder, step)

    @node(type="inference", writes=[*TOKENS, "rollout_logprobs", "response", "finished"], hand_over=True)
    def generate(
        self, batch: "Batch", ctx: "Context", temperature: float | None = None, held_out: bool = False
    ) -> dict[str, Any]:
        """Responses to the field `prompt`: text or chat messages."""
        return self.policy.generate(batch, ctx, temperature, held_out)

    @node(type="inference", writes="old_logprobs")
    def logprobs(self, batch: "Batch") -> "Ragged":
        """Of the response tokens, under the weights of this step."""
        return self.policy.logprobs(batch)

    @node(writes=TOKENS)
    def encode(self, batch: "Batch") -> dict[str, Any]:
        """Tokens of `prompt` and of a given `response`, which ends with the end-of-sequence token."""
        return self.policy.text.encode_pairs(batch["prompt"], batch["response"])

    @node(type="train", writes=(), balance="response_tokens")
    def update(
        self,
        batch: "Batch",
        ctx: "Context",
        loss: str,
        aggregate: "Mode" = "token-mean",
        mini_batches: int = 1,
        epochs: int = 1,
        **constants: Any,
    ) -> None:
        """Optimiser steps: `loss` is a function of tokens, one of distflow.algo.losses by name or any as
        `file.py:name`; `constants` are its own.

        Every step sees `epochs` × `mini_batches` updates. With more than one, and no field `old_logprobs`, the
        log-probs of the rollout are the old ones.
        """
        self.policy.update(batch, ctx, loss, aggregate, mini_batches, epochs, constants)


def find_loss(name: str, where: str, base: "Path") -> Any:
    """A built-in one by its name, any other as `package.module:name` or `file.py:name`."""
    return load(name if ":" in name else f"distflow.algo.losses:{name}", where, base)


class Reference:
    """The model as it was at the start, never trained."""

    def __init__(self, setup: Setup) -> None:
        from distflow.engine.policy import frozen

        self.trainer = frozen(setup)

    @node(type="inference", writes="ref_logprobs")
    def logprobs(self, batch: "Batch") -> "Ragged":
        return self.trainer.logprobs(batch)[0]
