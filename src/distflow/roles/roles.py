"""The built-in roles that have a model, as flows see them. Imports no torch: flows are planned without it."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from distflow.config.schema import TrainConfig
from distflow.errors import ConfigError
from distflow.flow.trace import node
from distflow.plan.layout import Layout
from distflow.roles.context import RoleContext, shard_degree
from distflow.util.seeds import eval_seed

if TYPE_CHECKING:
    from distflow.batch.batch import Batch, Ragged
    from distflow.batch.context import Context
    from distflow.comm.collectives import SendReceive
    from distflow.rollout.engine import SamplingParams
    from distflow.train.trainer import Trainer
    from distflow.weights.state import LoadTensors, RoleState

TOKENS = ("prompt_tokens", "response_tokens")
ROLLOUT = (*TOKENS, "rollout_logprobs", "response", "finished", "weight_version")  # what generation writes


class _Trained:
    """A role with a trainer: what its updates and checkpoints have in common."""

    role: RoleContext
    trainer: "Trainer | None"  # on ranks that only generate there is none

    def _update(self, batch: "Batch", ctx: "Context", **params: Any) -> None:
        from distflow.train.update_spec import update_spec

        assert self.trainer is not None
        self.trainer.update(batch, update_spec(self.role, **params), ctx)

    def role_state(self) -> "RoleState | None":
        """Returns what a checkpoint keeps of the role; None where it is not trained."""
        from distflow.model.description import describe

        trainer = self.trainer
        if trainer is None or not trainer.trainable:
            return None
        description = partial(describe, source=trainer.source, adapter=trainer.adapter)
        return replace(trainer.state(), describe=description)

    def load_role_state(self, values: Mapping[str, Any], load: "LoadTensors") -> None:
        assert self.trainer is not None
        self.trainer.load_state(values, load)


class Actor(_Trained):
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
        """Moves weights to where responses are generated; `version`: the steps that have trained them.

        They are the newest ones, or those of which `copy_weights` returned a copy.
        """
        return self.policy.sync_weights(version, weights)

    def copy_weights(self) -> Any:
        """Returns a copy of this rank's part of the weights, for a weight sync after they were trained further."""
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


class FrozenModel:
    """A model that is not trained, such as a teacher: `roles: {teacher: {model: …}}`."""

    def __init__(self, role: RoleContext, model: Mapping[str, Any] | None = None) -> None:
        """`model`: a model section as in a config; by default the model of the config."""
        from distflow.roles.second_model import source_of
        from distflow.train.trainer import make_trainer

        layout = role.layout("logprobs")
        assert layout is not None
        self.trainer = make_trainer(role, source_of(role, model), layout, role.train, trainable=False)

    @node(type="inference", writes="{role}_logprobs")
    def logprobs(self, batch: "Batch") -> "Ragged":
        """Computes log-probs of the response tokens; a role called `teacher` writes `teacher_logprobs`."""
        return self.trainer.infer(batch)


class Reference(FrozenModel):
    """The model as it was at the start, or another one."""

    @node(type="inference", writes="ref_logprobs")
    def logprobs(self, batch: "Batch") -> "Ragged":
        return self.trainer.infer(batch)


class Critic(_Trained):
    """A model of its own with a value head, which learns the expected return of every token."""

    trainer: "Trainer"

    def __init__(self, role: RoleContext) -> None:
        from distflow.roles.value_model import critic_trainer

        self.role, self.trainer = role, critic_trainer(role)

    @node(type="inference", writes="old_values")
    def values(self, batch: "Batch") -> "Ragged":
        """Computes the value of the state before each response token, under the weights of this step."""
        return self.trainer.infer(batch)

    @node(type="train", writes=(), balance="response_tokens")
    def update(self, batch: "Batch", ctx: "Context", loss: str = "value", **params: Any) -> None:
        """Makes optimiser steps towards the field `returns`; see `Actor.update`."""
        self._update(batch, ctx, loss=loss, **params)


class RewardModel(_Trained):
    """A model with a value head, whose value of a whole response is its score."""

    trainer: "Trainer"

    def __init__(self, role: RoleContext, model: Mapping[str, Any] | None = None) -> None:
        """`model`: a model section as in a config; by default the model of the config."""
        from distflow.roles.value_model import RewardScorer

        self.role, self.scorer = role, RewardScorer(role, model)
        self.trainer = self.scorer.trainer

    @staticmethod
    def check_training(config: TrainConfig, role: str, node: str, layout: Layout) -> None:
        if config.lora:
            raise ConfigError(f"train.lora: {node} trains a reward model, but adapters are for actors; remove it")

    @node(type="inference", reads=TOKENS, writes="score")
    def score(self, batch: "Batch", ctx: "Context") -> Any:
        """Scores `response_tokens` as an answer to `prompt_tokens`."""
        score = self.scorer.score(batch)
        if len(batch):
            ctx.metrics.log("reward/mean", float(score.mean()), len(batch))
            ctx.metrics.log("reward/min", float(score.min()), reduce="min")
            ctx.metrics.log("reward/max", float(score.max()), reduce="max")
        return score

    @node(writes=(*TOKENS, "preferred"))
    def encode_pair(self, batch: "Batch") -> dict[str, Any]:
        """Encodes preference pairs; see `Actor.encode_pair`."""
        return self.scorer.text.encode_preferences(batch)

    @node(type="train", writes=(), balance="response_tokens", whole_groups=True)
    def update_pairs(self, batch: "Batch", ctx: "Context", loss: str = "preference", **params: Any) -> None:
        """Makes optimiser steps that raise the score of the chosen response above that of the rejected one."""
        from distflow.roles.value_model import with_appended_token

        self._update(with_appended_token(batch), ctx, loss=loss, whole_groups=True, **params)
