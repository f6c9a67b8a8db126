"""The role `actor`, the policy that is trained. Imports no torch: flows are planned without it."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from distflow.algo.options import PositiveCount
from distflow.config.schema import TrainConfig
from distflow.errors import ConfigError
from distflow.flow.trace import node
from distflow.plan.field_bytes import IMAGES
from distflow.plan.layout import Layout
from distflow.roles.context import RoleContext, shard_degree
from distflow.roles.frozen import top_k
from distflow.roles.trained import EXPERTS, OPTIONAL, TOKENS, Trained
from distflow.util.seeds import eval_seed

if TYPE_CHECKING:
    from distflow.batch.batch import Batch, Ragged
    from distflow.batch.context import Context
    from distflow.comm.collectives import SendReceive
    from distflow.rollout.engine import SamplingParams

# What generation writes.
ROLLOUT = (*TOKENS, "rollout_logprobs", "response", "finished", "weight_version", "token_versions")


class Actor(Trained):
    """The policy: generates, computes log-probs, is trained. `generate` may have another layout than the rest."""

    def __init__(self, role: RoleContext) -> None:
        from distflow.roles.policy import Policy

        self.role, self.policy = role, Policy(role)
        self.trainer = self.policy.trainer

    @staticmethod
    def check_training(config: TrainConfig, role: str, node: str, layout: Layout) -> None:
        shard_degree(config, layout, node)
        if config.router_aux_loss and layout.sp > 1:
            raise ConfigError(
                f"train.router_aux_loss: {node} has sp {layout.sp}, and no rank sees the load of a whole response; use"
                " sp 1, or leave the loss out"
            )

    def sync_weights(self, version: int, weights: Any = None) -> "Iterator[SendReceive]":
        return self.policy.sync_weights(version, weights)

    def copy_weights(self) -> Any:
        return self.policy.copy_weights()

    @node(type="inference", writes=ROLLOUT, generates=True, optional=IMAGES)
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
            replay = self.role.rollout.router_replay
            rollout = generate_responses(
                *where, batch, sampling, seed, version, load.add, ctx.chunks, ctx.partial, replay
            )
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
        from distflow.rollout.responses import log_lengths, log_versions

        count = len(rollout["weight_version"])
        tokens = log_lengths(rollout, ctx.metrics, "val/" if held_out else "")
        if not held_out and count:
            log_versions(rollout["token_versions"], ctx.step - 1, ctx.metrics)
        ctx.metrics.log("perf/tokens", tokens, reduce="sum")
        return tokens

    @node(type="inference", writes="old_logprobs", optional=(*OPTIONAL, *EXPERTS), sequence_parallel=True)
    def logprobs(self, batch: "Batch") -> "Ragged":
        """Computes log-probs of the response tokens under the weights of this step."""
        assert self.trainer is not None
        return self.trainer.infer(batch)

    @node(type="inference", writes="ema_logprobs", optional=OPTIONAL, sequence_parallel=True)
    def ema_logprobs(self, batch: "Batch") -> "Ragged":
        """Computes the same under the moving average of the weights (`train.ema`)."""
        assert self.trainer is not None
        assert self.trainer.ema is not None
        with self.trainer.on_device(), self.trainer.ema.in_place():
            return self.trainer.infer(batch)

    @node(
        type="inference",
        writes=("teacher_top_ids", "teacher_top_logprobs"),
        optional=OPTIONAL,
        sequence_parallel=True,
    )
    def ema_top_logprobs(self, batch: "Batch", k: PositiveCount) -> dict[str, Any]:
        """Computes the k likeliest tokens, and their log-probs, under the moving average: the actor's own teacher."""
        assert self.trainer is not None
        assert self.trainer.ema is not None
        with self.trainer.on_device(), self.trainer.ema.in_place():
            ids, logprobs = self.trainer.infer_top(batch, top_k(self.role, k))
        return {"teacher_top_ids": ids, "teacher_top_logprobs": logprobs}

    @node(type="inference", writes="old_entropy", optional=(*OPTIONAL, *EXPERTS), sequence_parallel=True)
    def entropy(self, batch: "Batch") -> "Ragged":
        """Computes the entropy of the distribution that each response token was drawn from, with these weights."""
        assert self.trainer is not None
        return self.trainer.infer(batch, output=1)

    @node(type="inference", writes="energy", optional=(*OPTIONAL, *EXPERTS), sequence_parallel=True)
    def energy(self, batch: "Batch") -> "Ragged":
        """Computes the squared gradient of each response token's log-prob by the logits, with these weights."""
        assert self.trainer is not None
        return self.trainer.infer_energy(batch)

    @node(writes=TOKENS, optional=IMAGES)
    def encode(self, batch: "Batch") -> dict[str, Any]:
        """Encodes `prompt` and a given `response`, which ends with the end-of-sequence token."""
        from distflow.model.text import images_of

        return self.policy.text.encode_pairs(batch["prompt"], batch["response"], images_of(batch))

    @node(writes=(*TOKENS, "preferred"), optional=IMAGES)
    def encode_pair(self, batch: "Batch") -> dict[str, Any]:
        """Encodes `prompt` with `chosen` for the first sample of a prompt, with `rejected` for the second."""
        return self.policy.text.encode_preferences(batch)

    @node(
        type="train",
        writes=(),
        balance="response_tokens",
        optional=(*OPTIONAL, *EXPERTS),
        sequence_parallel=True,
    )
    def update(self, batch: "Batch", ctx: "Context", loss: str, **params: Any) -> None:
        """Makes optimiser steps on a loss: one of distflow.algo.losses by name, another function as `file.py:name`.

        `aggregate` says how token losses become one number. A step has `epochs` × `mini_batches` updates. The loss sees
        the old policy's log-probs as `old_logprobs`: the field of that name, or the one named by `old_logprobs`; with
        several updates and neither, `rollout_logprobs`. All other parameters are constants of the loss.
        """
        self._update(batch, ctx, loss=loss, **params)

    @node(
        type="train", writes=(), balance="response_tokens", whole_groups=True, optional=IMAGES, sequence_parallel=True
    )
    def update_pairs(self, batch: "Batch", ctx: "Context", loss: str, **params: Any) -> None:
        """Makes the same steps for a loss that compares the samples of a prompt: they are in one micro-batch."""
        self._update(batch, ctx, loss=loss, whole_groups=True, **params)


class ReplayingActor(Actor):
    """The actor of a config with `rollout.router_replay`: what it generates has the experts that were chosen."""

    @node(type="inference", writes=(*ROLLOUT, *EXPERTS), generates=True)
    def generate(
        self, batch: "Batch", ctx: "Context", temperature: float | None = None, held_out: bool = False
    ) -> dict[str, Any]:
        return super().generate(batch, ctx, temperature, held_out)  # type: ignore[no-any-return]
