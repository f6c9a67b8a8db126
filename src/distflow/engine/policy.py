"""What stands behind the actor: a trainer where it is trained, a generator where it generates, weights in between."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from distflow.algo.aggregate import Mode
from distflow.algo.correction import Kind
from distflow.config import Config
from distflow.config.schema import LearnConfig, LoraConfig
from distflow.data.balance import Ints
from distflow.data.batch import Batch, Ragged
from distflow.data.exchange import Collective
from distflow.data.transport import telling
from distflow.engine.model import parallel
from distflow.engine.model.llama_family import together
from distflow.engine.model.source import DTYPES, Source, kv_bytes
from distflow.engine.model.text import Text, ragged
from distflow.engine.role_context import RoleContext
from distflow.engine.roles import find_loss
from distflow.engine.rollout.builtin import Completions, Rollout
from distflow.engine.rollout.sampling import Sampling
from distflow.engine.train.trainer import Recipe, Trainer
from distflow.engine.weights import HandOver, Held, room, slices
from distflow.errors import ConfigError
from distflow.observe.metrics import StepMetrics
from distflow.plan.layout import Layout
from distflow.run.checkpoint import Part
from distflow.run.export import describe
from distflow.run.worker import Context

_HELD_OUT = 0x5EED  # evaluation draws its own noise


class Policy:
    def __init__(self, setup: RoleContext) -> None:
        self.setup, self.config = setup, setup.config
        source = source_of(setup)
        self.text = Text(source, prompt_limit(setup.config, source))
        trains = one_layout(setup, ("update", "update_pairs", "logprobs"))
        generates = setup.layouts.get("generate")
        learns = None if {"update", "update_pairs"}.isdisjoint(setup.layouts) else setup.config.train
        lora = learns.lora if learns else None
        self.trainer = None
        if trains and setup.rank in trains.ranks:
            self.trainer = trainer_of(setup, source, trains, learns, lora)
        self.generator = None
        if generates and setup.rank in generates.ranks:
            self.generator = Generator(setup, source, generates)
        self.transfer: HandOver | None = None
        self.shared = trains == generates and trains is not None and trains.dp == 1 and lora is None
        dtype = DTYPES[setup.config.train.dtype]
        if self.generator and not trains:
            self.generator.read(source)
        elif self.generator and self.trainer and self.shared and dtype == torch.float32:
            self.generator.fill(self.trainer.weights())  # the same memory: an update is seen at once
        elif trains and generates:
            specs = (self.trainer or self.generator).specs  # type: ignore[union-attr]
            self.transfer = HandOver(specs, Held(trains, True), Held(generates, False), setup.rank, dtype)

    def part(self) -> Part | None:
        return part_of(self.trainer, source_of(self.setup)) if self.trainer and self.trainer.config else None

    def hand_over(self) -> Iterator[Collective]:
        if self.transfer:
            source: Mapping[str, Tensor] = {}
            if self.trainer:
                with telling(self.trainer.layout.ranks):
                    source = self.trainer.weights()
            yield from self.transfer.run(source, self.generator.allocate() if self.generator else {})

    def generate(self, batch: Batch, ctx: Context, temperature: float | None, held_out: bool) -> dict[str, Any]:
        assert self.generator is not None
        _, first, prompt_of = np.unique(batch.groups, return_index=True, return_inverse=True)
        prompts = [self.text.encode(batch["prompt"][i]) for i in first.tolist()]
        seed = ctx.seed ^ _HELD_OUT if held_out else ctx.seed
        if temperature == 0:  # all responses to a prompt are the same one
            done = self.generator.generate(prompts, np.arange(len(prompts)), batch.ids[first], seed, temperature)
            done = done.select(prompt_of)
        else:
            done = self.generator.generate(prompts, prompt_of, batch.ids, seed, temperature)
        if self.transfer:
            self.generator.release()
        _tell_lengths(done.tokens, done.finished, ctx.metrics, "val/" if held_out else "")
        if self.generator.lead:
            ctx.metrics.log("perf/tokens", int(done.tokens.lengths.sum()), reduce="sum")
        return {
            "prompt_tokens": ragged([prompts[i] for i in prompt_of]),
            "response_tokens": done.tokens,
            "rollout_logprobs": done.logprobs,
            "response": self.text.decode(done.tokens),
            "finished": done.finished,
        }

    def logprobs(self, batch: Batch) -> Ragged:
        assert self.trainer is not None
        return self.trainer.ask(batch)

    def update(self, batch: Batch, ctx: Context, how: Mapping[str, Any], together: bool = False) -> None:
        assert self.trainer is not None
        several = how.get("mini_batches", 1) * how.get("epochs", 1) > 1
        if several and "old_logprobs" not in batch and "rollout_logprobs" in batch:
            batch = with_column(batch, "old_logprobs", batch["rollout_logprobs"])
        update(self.setup, self.trainer, batch, ctx, together, **how)


def update(
    setup: RoleContext,
    trainer: Trainer,
    batch: Batch,
    ctx: Context,
    together: bool = False,
    *,
    loss: str,
    aggregate: Mode = "token-mean",
    mini_batches: int = 1,
    epochs: int = 1,
    correct: Kind | None = None,
    correct_limit: float = 2.0,
    **constants: Any,
) -> None:
    """An update as a flow asks for it. `together`: the loss compares the samples of a prompt, called a `pair`."""
    config = setup.config
    if together:
        batch = with_column(batch, "pair", torch.from_numpy(batch.groups))
    found = find_loss(loss, f"{setup.role}.update: loss", config.base, constants)
    correction = (correct, correct_limit) if correct else None
    recipe = Recipe(found, constants, aggregate, config.rollout.max_tokens, mini_batches, epochs, together, correction)
    place = np.searchsorted(ctx.groups, batch.groups)  # of a prompt among those of the step
    total = setup.steps * mini_batches * epochs
    trainer.update(batch, place * mini_batches // len(ctx.groups), recipe, total, ctx.metrics)


def with_column(batch: Batch, name: str, column: Any) -> Batch:
    return Batch(batch.ids, batch.groups, {**batch.columns, name: column})


class Generator:
    """A copy of the model's modules with plain tensors for weights: no hooks, no DTensors, nothing between layers."""

    def __init__(self, setup: RoleContext, source: Source, layout: Layout) -> None:
        rollout = setup.config.rollout
        self.rank, self.device, self.dtype = setup.rank, setup.device, DTYPES[setup.config.train.dtype]
        self.model = source.skeleton()
        self.model.requires_grad_(False)
        self.model._apply(
            lambda t: t if t.is_meta else t.to(setup.device)
        )  # buffers; the parameters have no memory yet
        cut = parallel.styles(self.model, layout.tp, "placement.nodes.actor.generate")
        self.specs = parallel.specs(self.model, cut)
        self.held = Held(layout, sharded=False)
        group = setup.meshes[layout].get_group("tp") if layout.tp > 1 else None
        if group is not None:
            parallel.CutInPlace(self.model, cut, group)
        first = layout.cells[layout.cell_of(setup.rank) or 0][0]
        self.lead = setup.rank == first  # speaks for its tensor-parallel cell

        def agree(tokens: Tensor) -> Tensor:
            if group is not None:
                dist.broadcast(tokens, first, group=group)
            return tokens

        per_token = kv_bytes(source.config, self.dtype, layout.tp)
        cache = int(rollout.kv_cache_gb * (1 << 30))
        alone = group is None and setup.device.type == "cpu"  # replicas would meet each other in different lanes
        lanes = torch.get_num_threads() if alone else 1
        self.engine = Rollout(self.model, per_token, cache, rollout.max_sequences, agree, setup.device, lanes)
        text = Text(source, 0)
        self.sampling = Sampling(
            rollout.max_tokens,
            rollout.temperature,
            rollout.top_p,
            rollout.top_k,
            rollout.min_tokens,
            text.stop_tokens(source, rollout.stop),
        )

    def generate(
        self, prompts: list[list[int]], prompt_of: Ints, ids: Ints, seed: int, temperature: float | None
    ) -> Completions:
        how = self.sampling if temperature is None else replace(self.sampling, temperature=temperature)
        return self.engine.generate(prompts, prompt_of, ids, how, seed)

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Use these tensors as weights, as they are."""
        for name, tensor in tensors.items():
            module, _, leaf = name.rpartition(".")
            setattr(self.model.get_submodule(module), leaf, nn.Parameter(tensor, requires_grad=False))
        self.model.tie_weights()

    def allocate(self) -> dict[str, Tensor]:
        """Memory for the weights, to be filled."""
        shapes = {s.name: tuple(hi - lo for lo, hi in self.held.box(s, self.rank)) for s in self.specs}
        made = room(shapes, together(self.model), self.dtype, self.device)
        self.fill(made)
        return made

    def release(self) -> None:
        """Give the memory of the weights back: training needs it."""
        self.fill({spec.name: torch.empty(0, dtype=self.dtype) for spec in self.specs})

    @torch.no_grad()
    def read(self, source: Source) -> None:
        """Weights straight from where the model comes from."""
        read = source.reader([s.name for s in self.specs])
        made = self.allocate()
        for spec in self.specs:
            made[spec.name].copy_(read(spec.name, slices(self.held.box(spec, self.rank))))


def frozen(setup: RoleContext) -> Trainer:
    """A model that is only asked for log-probs."""
    layout = one_layout(setup, ("logprobs",))
    assert layout is not None
    return trainer_of(setup, source_of(setup), layout, None)


def prompt_limit(config: Config, source: Source) -> int:
    positions = int(getattr(source.config.get_text_config(), "max_position_embeddings", None) or 1 << 30)
    room = positions - config.rollout.max_tokens
    if room < 1:
        raise ConfigError(
            f"rollout.max_tokens: {config.rollout.max_tokens} leaves no room for a prompt in the model's {positions}"
            " positions; lower it"
        )
    return min(config.data.max_prompt or room, room)


def source_of(setup: RoleContext) -> Source:
    if setup.source is None:
        raise ConfigError(f"role '{setup.role}' needs a model; say which: `model: name-or-directory`")
    return setup.source


def trainer_of(
    setup: RoleContext, source: Source, layout: Layout, learns: LearnConfig | None, lora: LoraConfig | None = None
) -> Trainer:
    train = learns or setup.config.train
    return Trainer(
        setup.role,
        source,
        layout,
        setup.meshes[layout],
        setup.rank,
        setup.config.rollout.temperature or 1.0,
        train.micro_tokens,
        train.dtype,
        learns,
        train.recompute and learns is not None,
        lora,
    )


def part_of(trainer: Trainer, source: Source) -> Part:
    """What a model has learned, for a checkpoint."""
    return Part(*trainer.state(), partial(describe, source=source, adapter=trainer.adapter))


def one_layout(setup: RoleContext, methods: tuple[str, ...]) -> Layout | None:
    """Nodes that share a model run in one place."""
    found = {m: setup.layouts[m] for m in methods if m in setup.layouts}
    if len(set(found.values())) > 1:
        told = ", ".join(f"{setup.role}.{m} as {layout}" for m, layout in found.items())
        raise ConfigError(f"placement: {told} work on one model; place them alike")
    return next(iter(found.values()), None)


def _tell_lengths(tokens: Ragged, finished: Tensor, metrics: StepMetrics, prefix: str) -> None:
    n = len(tokens)
    metrics.log(f"{prefix}response_length/mean", float(tokens.lengths.mean()), n)
    metrics.log(f"{prefix}response_length/max", float(tokens.lengths.max()), reduce="max")
    metrics.log(f"{prefix}response_length/clip_ratio", 1 - float(finished.float().mean()), n)
