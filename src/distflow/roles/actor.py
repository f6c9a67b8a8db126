"""The role `actor`, the policy that is trained. Imports no torch: flows are planned without it."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from distflow.config.schema import TrainConfig
from distflow.errors import ConfigError
from distflow.flow.trace import node
from distflow.plan.layout import Layout
from distflow.roles.context import RoleContext, shard_degree
from distflow.roles.trained import TOKENS, Trained
from distflow.util.seeds import eval_seed

if TYPE_CHECKING:
    from distflow.batch.batch import Batch, Ragged
    from distflow.batch.context import Context
    from distflow.comm.collectives import SendReceive
    from distflow.rollout.engine import SamplingParams

ROLLOUT = (*TOKENS, "rollout_logprobs", "response", "finished", "weight_version")  # what generation writes


class Actor(Trained):
    """The policy: generates, computes log-probs, is trained. `generate` may have another layout than the rest."""

    def __init__(self, role: RoleContext) -> None:
        from distflow.roles.policy import Policy

        self.role, self.policy = role, Policy(role)
        self.trainer = self.policy.trainer

    @staticmethod
    def check_training(config: TrainConfig, role: str, node: str, layout: Layout) -> None:
        shard_degree(config, layout, node)
        if config.lora and layout.tp > 1:
            raise ConfigError(
                f"placement: {node} has tp {layout.tp}, and an adapter (train.lora) is trained with tp 1; use dp alone"
                f" for it, and for generation any tp: placement.nodes.{role}.generate"
            )

    def sync_weights(self, version: int, weights: Any = None) -> "Iterator[SendReceive]":
        return self.policy.sync_weights(version, weights)

    def copy_weights(self) -> Any:
        return self.policy.copy_weights()

    @node(type="inference", writes=ROLLOUT, generates=True)
    def generate(
        self, batch: "Batch", ctx: "Context", temperature: float | None = None, held_out: bool = False
    ) -> dict[str, Any]:
        """Generates responses to the field `prompt`: text or chat messages."""
        from distflow.rollout.engine_load import EngineLoad
        from distflow.rollout.partial import carried_tokens
        from distflow.rollout.responses import generate_responses

        policy, sampling, seed = self.policy, self._sampling(temperature), eval_seed(ctx.seed) if held_out else ctx.seed
        assert policy.engine is not None
        with ctx.record.call("engine") as details:
            load = EngineLoad()
            version = policy.weight_version
            where = policy.engine, policy.text
            rollout = generate_responses(*where, batch, sampling, seed, version, load.add, ctx.chunks, ctx.partial)
            details["left"] = load.points()
        policy.release_engine_memory()
        tokens = self._log_rollout(rollout, ctx, held_out)
        if ctx.partial and tokens:
            ctx.metrics.log("rollout/carried_frac", carried_tokens(ctx.partial, batch) / tokens, tokens)
        return rollout

    def _sampling(self, temperature: float | None) -> "SamplingParams":
        sampling = self.policy.sampling
        return sampling if temperature is None else replace(sampling, temperature=temperature)

    def _log_rollout(self, rollout: Mapping[str, Any], ctx: "Context", held_out: bool) -> int:
        """Logs lengths and staleness; returns how many tokens were sampled."""
        from distflow.rollout.responses import log_lengths

        count = len(rollout["weight_version"])
        tokens = log_lengths(rollout, ctx.metrics, "val/" if held_out else "")
        if not held_out and count:
            staleness = ctx.step - 1 - rollout["weight_version"].double().mean()
            ctx.metrics.log("rollout/staleness", float(staleness), count)
        ctx.metrics.log("perf/tokens", tokens, reduce="sum")
        return tokens

    @node(type="inference", writes="old_logprobs")
    def logprobs(self, batch: "Batch") -> "Ragged":
        """Computes log-probs of the response tokens under the weights of this step."""
        assert self.trainer is not None
        return self.trainer.infer(batch)

    @node(type="inference", writes="ema_logprobs")
    def ema_logprobs(self, batch: "Batch") -> "Ragged":
        """Computes the same under the moving average of the weights (`train.ema`)."""
        assert self.trainer is not None
        assert self.trainer.ema is not None
        with self.trainer.ema.in_place():
            return self.trainer.infer(batch)

    @node(writes=TOKENS)
    def encode(self, batch: "Batch") -> dict[str, Any]:
        """Encodes `prompt` and a given `response`, which ends with the end-of-sequence token."""
        return self.policy.text.encode_pairs(batch["prompt"], batch["response"])

    @node(writes=(*TOKENS, "preferred"))
    def encode_pair(self, batch: "Batch") -> dict[str, Any]:
        """Encodes `prompt` with `chosen` for the first sample of a prompt, with `rejected` for the second."""
        return self.policy.text.encode_preferences(batch)

    @node(type="train", writes=(), balance="response_tokens")
    def update(self, batch: "Batch", ctx: "Context", loss: str, **params: Any) -> None:
        """Makes optimiser steps on a loss: one of distflow.algo.losses by name, another function as `file.py:name`.

        `aggregate` says how token losses become one number. A step has `epochs` × `mini_batches` updates. The loss sees
        the old policy's log-probs as `old_logprobs`: the field of that name, or the one named by `old_logprobs`; with
        several updates and neither, `rollout_logprobs`. All other parameters are constants of the loss.
        """
        self._update(batch, ctx, loss=loss, **params)

    @node(type="train", writes=(), balance="response_tokens", whole_groups=True)
    def update_pairs(self, batch: "Batch", ctx: "Context", loss: str, **params: Any) -> None:
        """Makes the same steps for a loss that compares the samples of a prompt: they are in one micro-batch."""
        self._update(batch, ctx, loss=loss, whole_groups=True, **params)
