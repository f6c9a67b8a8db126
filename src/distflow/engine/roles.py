"""The roles that have a model, as flows see them. Importing this imports no torch: flows are planned without it."""

import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from distflow.engine.role_context import RoleContext
from distflow.errors import ConfigError, suggest
from distflow.flow.importing import load
from distflow.flow.trace import node

if TYPE_CHECKING:
    from pathlib import Path

    from torch.distributed import ProcessGroup

    from distflow.data.batch import Batch, Ragged
    from distflow.data.exchange import Collective
    from distflow.run.checkpoint import Part
    from distflow.run.worker import Context

TOKENS = ("prompt_tokens", "response_tokens")


class Actor:
    """The policy: generates, tells log-probs, learns. `generate` may have another layout than the rest."""

    def __init__(self, setup: RoleContext) -> None:
        from distflow.engine.policy import Policy

        self.policy = Policy(setup)

    def hand_over(self) -> "Iterator[Collective]":
        """The newest weights to where responses are generated."""
        return self.policy.hand_over()

    def part(self) -> "Part | None":
        """What it has learned, for a checkpoint; None where it does not learn."""
        return self.policy.part()

    def restore(self, folder: "Path", group: "ProcessGroup") -> None:
        """As it was in a checkpoint. To be called where it learns."""
        assert self.policy.trainer is not None
        self.policy.trainer.restore(folder, group)

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

    @node(writes=(*TOKENS, "preferred"))
    def encode_pair(self, batch: "Batch") -> dict[str, Any]:
        """Tokens of `prompt` and of `chosen` for the first sample of a prompt, `rejected` for the second."""
        return self.policy.text.encode_preferences(batch)

    @node(type="train", writes=(), balance="response_tokens")
    def update(self, batch: "Batch", ctx: "Context", loss: str, **how: Any) -> None:
        """Optimiser steps: `loss` is a function of tokens, one of distflow.algo.losses by name, any as `file.py:name`.

        `aggregate` says how token losses become one number. Every step sees `epochs` × `mini_batches` updates; with
        more than one, and no field `old_logprobs`, the log-probs of the rollout are the old ones. What else is given
        are constants of the loss.
        """
        self.policy.update(batch, ctx, {"loss": loss, **how})

    @node(type="train", writes=(), balance="response_tokens", whole_groups=True)
    def update_pairs(self, batch: "Batch", ctx: "Context", loss: str, **how: Any) -> None:
        """The same for a loss that compares the samples of a prompt: they are in one micro-batch."""
        self.policy.update(batch, ctx, {"loss": loss, **how}, together=True)


class Reference:
    """The model as it was at the start, never trained."""

    def __init__(self, setup: RoleContext) -> None:
        from distflow.engine.policy import frozen

        self.trainer = frozen(setup)

    @node(type="inference", writes="ref_logprobs")
    def logprobs(self, batch: "Batch") -> "Ragged":
        return self.trainer.ask(batch)


class Critic:
    """A model of its own that tells what is still to be gained, token by token, and learns it."""

    def __init__(self, setup: RoleContext) -> None:
        from distflow.engine.value_models import critic

        self.model = critic(setup)

    def part(self) -> "Part | None":
        return self.model.part()

    def restore(self, folder: "Path", group: "ProcessGroup") -> None:
        self.model.trainer.restore(folder, group)

    @node(type="inference", writes="old_values")
    def values(self, batch: "Batch") -> "Ragged":
        """Of the state before each response token, under the weights of this step."""
        return self.model.trainer.ask(batch)

    @node(type="train", writes=(), balance="response_tokens")
    def update(self, batch: "Batch", ctx: "Context", loss: str = "value", **how: Any) -> None:
        """Optimiser steps towards the field `returns`; see `Actor.update`."""
        self.model.update(batch, ctx, {"loss": loss, **how})


class RewardModel:
    """A model with one number for a head, which is the score of a whole response."""

    def __init__(self, setup: RoleContext, model: Mapping[str, Any] | None = None) -> None:
        """`model`: where it comes from, as in a config; by default the model of the config."""
        from distflow.engine.value_models import reward_model

        self.model = reward_model(setup, model)

    def part(self) -> "Part | None":
        return self.model.part()

    def restore(self, folder: "Path", group: "ProcessGroup") -> None:
        self.model.trainer.restore(folder, group)

    @node(type="inference", reads=TOKENS, writes="score")
    def score(self, batch: "Batch", ctx: "Context") -> Any:
        """Of `response_tokens` as an answer to `prompt_tokens`."""
        return self.model.score(batch, ctx)

    @node(writes=(*TOKENS, "preferred"))
    def encode_pair(self, batch: "Batch") -> dict[str, Any]:
        """See `Actor.encode_pair`."""
        return self.model.text.encode_preferences(batch)

    @node(type="train", writes=(), balance="response_tokens", whole_groups=True)
    def update_pairs(self, batch: "Batch", ctx: "Context", loss: str = "preference", **how: Any) -> None:
        """Optimiser steps that tell the chosen response from the rejected one."""
        self.model.update_pairs(batch, ctx, {"loss": loss, **how})


OF_UPDATES = ("loss", "aggregate", "mini_batches", "epochs", "correct", "correct_limit")


def find_loss(name: str, where: str, base: "Path", told: Iterable[str] = ()) -> Any:
    """A built-in one by its name, any other as `package.module:name` or `file.py:name`.

    `told` are the constants of the update: what is not of its own is for the loss, and refused if that has none such.
    """
    found = load(name if ":" in name else f"distflow.algo.losses:{name}", where, base)
    if not callable(found):
        raise ConfigError(f"{where}: '{name}' is a {type(found).__name__}, not a function of tokens")
    parameters = inspect.signature(found).parameters
    known = list(parameters)[1:]
    for constant in told:
        if constant in known or constant in OF_UPDATES or any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            continue
        raise ConfigError(
            f"{where}: '{name}' has no parameter '{constant}', which the flow gives it{suggest(constant, known)};"
            " a loss that takes `**rest` can pass it on to distflow.algo.losses.finish, which knows kl and entropy"
        )
    return found
