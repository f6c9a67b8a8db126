"""The trainer: a model sharded over its layout, its optimiser, inference on response tokens, and updates."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from distflow.algo.aggregate import Counts, token_weights
from distflow.algo.kl import kl
from distflow.algo.losses import Loss
from distflow.algo.masks import off_policy_mask
from distflow.algo.options import AggregateBy
from distflow.algo.tokens import Tokens, TopLogprobs
from distflow.batch.batch import Batch, Ragged
from distflow.batch.branches import Sequences
from distflow.batch.context import Context, MetricLog
from distflow.batch.response_mask import ModelTokens
from distflow.config.schema import LoraConfig, TrainerConfig
from distflow.cpu.modules import use_cpu_modules
from distflow.errors import ConfigError
from distflow.model.experts import experts_blocks
from distflow.model.images import Images, vision_tower
from distflow.model.lora import LoraAdapter, MergedWeights, adapter_pairs, base_name
from distflow.model.sequence_parallel import SequenceParallel, check_divisible
from distflow.model.source import DTYPES, Read, Source
from distflow.model.tensor_parallel import parallelize_for_training, parameter_specs, tp_styles
from distflow.plan.layout import Layout
from distflow.roles.context import RoleContext, shard_degree
from distflow.train import adafactor, fsdp
from distflow.train.adafactor import Adafactor
from distflow.train.compiled import compile_layers
from distflow.train.ema import Ema
from distflow.train.entropy_control import EntropyControl
from distflow.train.heads import HEADS, TopK
from distflow.train.lr_schedule import learning_rate
from distflow.train.moments import Moment
from distflow.train.muon import ADAMW_MOMENTS, MUON_MOMENTS, MatrixExchange, Muon, is_matrix
from distflow.train.offload import HostActivations, HostShards, OffloadedAdamW
from distflow.train.packing import (
    EMA_LOGPROBS,
    OLD,
    REFERENCE,
    RESPONSE,
    ROLLOUT,
    TEACHER_TOP_LOGPROBS,
    Pack,
    Rows,
    empty_pack,
    micro_batches,
    pack,
)
from distflow.train.readings import Readings
from distflow.train.router_load import RouterLoad
from distflow.train.token_masks import POLICY_MASK, with_covariance, with_high_entropy
from distflow.train.update_spec import UpdateSpec
from distflow.train.vision import Vision
from distflow.util.arrays import Ints
from distflow.weights.shards import Shards, TensorSpec, slices
from distflow.weights.state import EMA, WEIGHTS, RoleState

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RankMesh:
    """The place of a rank in a layout, and the layout's device mesh."""

    layout: Layout
    mesh: DeviceMesh  # whose `dp` is dp × sp of the layout
    rank: int
    sequence_group: dist.ProcessGroup | None = None  # the ranks with which this one divides sequences


@dataclass(frozen=True)
class TrainerOptions:
    """Options of a model that is trained, or only run, if it is not `trainable`."""

    config: TrainerConfig
    trainable: bool = True
    lora: LoraConfig | None = None  # with one, only the adapter is trained
    freeze: Sequence[str] = ()  # parts of the model that are not trained
    ema: float | None = None  # the decay of a moving average of what is trained
    ema_every: int = 1  # optimiser steps between two of its updates
    temperature: float = 1.0  # of the log-probs
    router_aux_loss: float = 0.0  # weight of the loss that evens out the load of experts
    images: Images | None = None  # of prompts, if the model reads images


class Trainer:
    """One rank's part of a model, in shards, which are float32 if they are trained. `name` is the prefix of metrics."""

    def __init__(self, name: str, source: Source, place: RankMesh, options: TrainerOptions) -> None:
        layout, mesh, rank = place.layout, place.mesh, place.rank
        config, trainable, lora = options.config, options.trainable, options.lora
        self.name, self.source, self.layout, self.mesh, self.config = name, source, layout, mesh, config
        self.trainable, self.temperature = trainable, options.temperature
        self.rank, self.device = rank, torch.device(mesh.device_type)
        self.workers = layout.without_sp.dp  # that compute a gradient of their own, of other samples or tokens
        self.sequences = SequenceParallel.of(place.sequence_group)
        lm = source.skeleton()
        check_divisible(lm, layout, "placement")
        if self.device.type == "cpu" and not config.compile:
            use_cpu_modules(lm)
        self.vision = Vision(lm, options.images) if options.images else None
        self.tp_styles = tp_styles(lm, layout.tp, "placement")
        self.specs = parameter_specs(lm, self.tp_styles)  # of the model, with or without an adapter
        self.shards = Shards(layout.without_sp, fsdp.sharding(mesh).size())
        self.adapter = LoraAdapter(lm, lora, self.tp_styles) if lora else None
        cut = self.adapter.tp_styles(self.tp_styles) if self.adapter else self.tp_styles
        parallelize_for_training(lm, cut, mesh)
        if config.gradient_checkpointing and trainable:
            lm.gradient_checkpointing_enable({"use_reentrant": False})
            lm.train()
        if config.compile:
            compile_layers(lm)
        self.model = HEADS[source.head](lm, self.sequences)
        if not trainable:
            self.model.requires_grad_(False)
        elif "vision" in options.freeze:
            vision_tower(lm).requires_grad_(False)
        fsdp.shard(self.model, lm, mesh, DTYPES[config.dtype])
        self._materialize(rank)
        self.updates = 0  # optimiser steps so far
        self.entropy = EntropyControl()
        self.optimizer = self._make_optimizer() if trainable else None
        self.routers: RouterLoad | None = None
        if (
            trainable and (blocks := experts_blocks(lm)) and self.sequences.ranks == 1
        ):  # else none sees a whole response
            self.routers = RouterLoad(blocks, options.router_aux_loss, self.device)
        self.ema: Ema | None = None
        self.ema_every = options.ema_every
        if options.ema is not None:
            self.ema = Ema(options.ema, fsdp.local_shards(self.trained))
        if config.offload_activations and self.device.type == "cpu" and rank == layout.ranks[0]:
            logger.warning("%s: offload_activations has no effect on a CPU, where activations are in host memory", name)
        self.host: HostShards | None = None  # where the shards are between uses
        if config.offload == "all":
            self.host = HostShards(fsdp.local_shards([*self.base, *(self.trained if self.adapter else ())]))

    def _materialize(self, rank: int) -> None:
        """Allocates this rank's shards and reads the weights into them. Frozen ones have the dtype of computation."""
        compute = DTYPES[self.config.dtype]

        def allocated(t: Tensor) -> Tensor:
            dtype = t.dtype if t.requires_grad else compute
            return torch.empty_like(t, dtype=dtype, device=self.mesh.device_type) if t.is_meta else t

        self.model._apply(allocated)  # type: ignore[no-untyped-call]
        self.model.lm.tie_weights()
        # Now, as FSDP shows whole tensors during a pass and, for the root, until the next.
        parameters = {base_name(name): p for name, p in self.model.lm.named_parameters()}
        self.base = self.trained = [(spec, parameters[spec.name]) for spec in self.specs]
        self._read(self.source.reader({s.name: s.shape for s in self.specs}), rank)
        if self.adapter:
            self.trained = [(spec, parameters[spec.name]) for spec in self.adapter.specs]
            self._read(self.adapter.initial_weights(self.source.seed), rank)
        elif self.trainable:
            self.trained = [(spec, p) for spec, p in self.base if p.requires_grad]

    @torch.no_grad()
    def _read(self, read: Read, rank: int) -> None:
        for spec, p in self.trained:
            fsdp.local(p).copy_(read(spec.name, slices(self.shards.box(spec, rank))))

    def _make_optimizer(self) -> torch.optim.Optimizer:
        # The optimiser sees this rank's shards as plain tensors in the same memory.
        self.optimized = [nn.Parameter(shard) for shard in fsdp.local_shards(self.trained).values()]
        specs = {shard: spec for (spec, _), shard in zip(self.trained, self.optimized, strict=True)}
        self.moments: dict[nn.Parameter, dict[str, Moment]]
        config, of_muon = self.config, list[nn.Parameter]()
        decay: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for (spec, p), shard in zip(self.trained, self.optimized, strict=True):
            if config.optimizer == "muon" and is_matrix(spec) and not self._is_embedding(p):
                of_muon.append(shard)
            else:
                decay[len(spec.shape) > 1].append(shard)
        groups: list[dict[str, Any]] = [
            {"params": ps, "weight_decay": config.weight_decay * matrices} for matrices, ps in decay.items()
        ]
        if config.optimizer == "adafactor":
            self.moments = {shard: adafactor.moments_of(spec) for shard, spec in specs.items()}
            groups = [group | {"specs": [specs[p] for p in group["params"]]} for group in groups]
            return Adafactor(groups, self.shards, self.mesh, self.rank, lr=config.lr)
        options: dict[str, Any] = {"lr": config.lr, "betas": config.betas, "eps": config.eps}
        if config.optimizer == "adamw8bit":
            from distflow.train import adamw8bit  # an extra

            self.moments = {shard: adamw8bit.moments_of(spec) for shard, spec in specs.items()}
            optimizer = adamw8bit.AdamW8bit([group for group in groups if group["params"]], **options)
            optimizer.state.update({shard: self._state_of(shard) for shard in self.optimized})
            return optimizer
        names = dict.fromkeys(self.optimized, ADAMW_MOMENTS) | dict.fromkeys(of_muon, MUON_MOMENTS)
        self.moments = {shard: {name: Moment(specs[shard]) for name in names[shard]} for shard in self.optimized}
        options["fused"] = True
        if not of_muon:
            return (torch.optim.AdamW if config.offload == "none" else OffloadedAdamW)(groups, **options)
        matrices = [specs[shard] for shard in of_muon]
        of = {"params": of_muon, "names": [spec.name for spec in matrices], "muon": True}
        groups.append(of | {"weight_decay": config.weight_decay})
        return Muon(groups, MatrixExchange(matrices, self.shards, self.mesh, self.rank), **options)

    def _state_of(self, shard: nn.Parameter, steps: int = 0) -> dict[str, Tensor]:
        """Returns the state that the optimiser has for a shard after so many steps, with moments of 0."""
        device = torch.device("cpu") if self.config.offload != "none" else shard.device
        moments = {name: m.zeros(self.shards, self.rank, device) for name, m in self.moments[shard].items()}
        # Fused AdamW needs the count where the shard is.
        return {"step": torch.tensor(float(steps), device=shard.device), **moments}

    def _is_embedding(self, p: Tensor) -> bool:
        lm = self.model.lm
        return any(m is not None and m.weight is p for m in (lm.get_input_embeddings(), lm.get_output_embeddings()))

    def on_device(self, changes: bool = False) -> AbstractContextManager[None]:
        """Has the weights on the device inside of it, wherever they are between uses; the outermost use says whether
        it `changes` them."""
        return self.host.on_device(changes) if self.host else nullcontext()

    def _at_rest(self, parameters: Sequence[tuple[TensorSpec, Tensor]]) -> Mapping[str, Tensor]:
        """Returns this rank's shards of parameters, on the device: those in host memory when they are looked up."""
        if self.host is None:
            return fsdp.local_shards(parameters)
        return self.host.copies(spec.name for spec, _ in parameters)

    def weights(self) -> Mapping[str, Tensor]:
        """Returns this rank's shard of each parameter, with the adapter merged. All ranks call it together."""
        if self.adapter is None:
            return self.base_weights()
        shards = self.adapter.gather_a(self._at_rest(self.trained), fsdp.sharding(self.mesh).get_group())
        return MergedWeights(self.base_weights(), adapter_pairs(shards), self.adapter.scale)

    def base_weights(self) -> Mapping[str, Tensor]:
        """Returns this rank's shard of each parameter, without the adapter."""
        return self._at_rest(self.base)

    def adapter_weights(self) -> Mapping[str, Tensor]:
        """Returns this rank's shards of the adapter alone, as engines add it: B is scaled."""
        assert self.adapter is not None
        return self.adapter.scaled(self._at_rest(self.trained))

    def state(self) -> RoleState:
        """Returns the state for a checkpoint: numbers, and this rank's shards of trained parameters and moments."""
        assert self.optimizer is not None
        tensors: dict[str, Tensor] = {}
        specs: dict[str, TensorSpec] = {}
        counted = next(iter(self.optimizer.state.values()), {"step": 0})  # the same for all
        steps = int(counted["step"])
        for (spec, p), shard in zip(self.trained, self.optimized, strict=True):
            shards = {WEIGHTS: self.host.host[spec.name] if self.host else fsdp.local(p.detach())}
            if steps and (state := self.optimizer.state.get(shard)):
                for key, moment in self.moments[shard].items():
                    tensors[f"{key}.{spec.name}"] = state[key]
                    if moment.cut:
                        specs[f"{key}.{spec.name}"] = moment.spec
            if self.ema:
                shards[EMA] = self.ema.shards[spec.name]
            tensors |= {prefix + spec.name: tensor for prefix, tensor in shards.items()}
            specs |= {prefix + spec.name: spec for prefix in shards}
        for spec, p in [] if self.adapter else self.base:
            for prefix in (WEIGHTS, *([EMA] if self.ema else [])):  # what is frozen is its own average
                if prefix + spec.name not in tensors:
                    tensors[prefix + spec.name] = self.host.host[spec.name] if self.host else fsdp.local(p.detach())
                    specs[prefix + spec.name] = spec
        values = {"updates": self.updates, "optimizer_steps": steps, **self.entropy.state()}
        return RoleState(values, tensors, specs, self.shards)

    def restore(self, values: Mapping[str, Any]) -> None:
        """Takes up the numbers of a state, and makes the moments that it has: `state` then returns all its tensors."""
        assert self.optimizer is not None
        if values["optimizer_steps"]:
            for shard in self.optimized:
                self.optimizer.state[shard] = self._state_of(shard, values["optimizer_steps"])
        self.updates = values["updates"]
        self.entropy.restore(values)

    def infer(self, batch: Batch, output: int = 0) -> Ragged:
        """Returns the log-prob of every response token, or its value, in the order of the batch; 0 for masked ones.

        `output`: which one of the head, of log-probs and entropy.
        """
        return self._infer(batch, lambda packed: self.model(packed, self.temperature)[output : output + 1])[0]

    def infer_top(self, batch: Batch, top: TopK) -> tuple[Ragged, Ragged]:
        """Returns the likeliest tokens at the place of every response token, and their log-probs: [tokens, k] each."""
        ids, logprobs = self._infer(batch, lambda packed: self.model(packed, self.temperature, top))
        return ids, logprobs

    def infer_energy(self, batch: Batch) -> Ragged:
        """Returns ‖1 − π‖² of every response token, of the distribution π that it was drawn from."""
        return self._infer(batch, lambda packed: self.model(packed, self.temperature, None, True))[0]

    @torch.no_grad()
    def _infer(self, batch: Batch, outputs_of: Callable[[Pack], Sequence[Tensor]]) -> list[Ragged]:
        """Returns columns for whole responses from outputs for the model's tokens."""
        lengths = batch[RESPONSE].lengths
        starts, results, readings = np.cumsum(lengths) - lengths, list[Tensor](), Readings()
        with self.on_device():
            micros, _ = self._micro_batches(batch, [np.arange(len(batch))])[0]
            for micro in micros:
                packed = self._pack(batch, micro)
                index, model_tokens = packed.index, packed.model_tokens
                count = len(packed.targets)  # a pack without a response still has an output
                outputs = [out[:count] for out in outputs_of(packed)]
                results = results or [
                    torch.empty(int(lengths.sum()), *out.shape[1:], dtype=out.dtype) for out in outputs
                ]
                for result, out in zip(results, outputs, strict=True):

                    def place(
                        read: Tensor,
                        result: Tensor = result,
                        index: Ints = index,
                        model_tokens: ModelTokens = model_tokens,
                    ) -> None:
                        for i, part in zip(index, model_tokens.spread(read), strict=True):
                            result[starts[i] : starts[i] + len(part)] = part

                    readings.add(out, place)
            self.model.reshard()  # type: ignore[operator]
            readings.read()
        return [Ragged.packed(result, lengths, tuple(result.shape[1:])) for result in results]

    def update(self, batch: Batch, spec: UpdateSpec, ctx: Context) -> None:
        """Makes the optimiser steps of one step: each mini-batch of its prompts, `epochs` times."""
        with self.on_device(changes=True):
            batch = _prepared(batch, spec)
            if spec.top_entropy < 1:
                batch = with_high_entropy(batch, spec.top_entropy, self._over_workers)
            if spec.covariance:
                batch = with_covariance(batch, spec.covariance, ctx.seed, self._over_workers)
            self._update(batch, spec, ctx)

    def _update(self, batch: Batch, spec: UpdateSpec, ctx: Context) -> None:
        # Round-robin: ranks hold consecutive prompts, and each should have a share of every mini-batch.
        mini_batch = np.searchsorted(ctx.groups, batch.groups) % spec.mini_batches
        minis = [np.flatnonzero(mini_batch == m) for m in range(spec.mini_batches)]
        agreed = self._micro_batches(batch, minis, spec.whole_groups, spec.aggregate_by)
        readings, initial_entropy_weight = Readings(), spec.constants.get("entropy", 0.0)
        for epoch in range(spec.epochs):
            for k, (micros, (tokens, samples)) in enumerate(agreed):
                counts, on_policy = Counts(tokens, samples, spec.horizon), epoch == k == 0
                if spec.entropy:
                    weight = self.entropy.applied(spec.entropy, initial_entropy_weight)
                    spec = replace(spec, constants={**spec.constants, "entropy": weight})
                    ctx.metrics.log("actor/entropy_weight", weight)
                for i, index in enumerate(micros):
                    packed = self._pack(batch, index)
                    # With hybrid sharding, replicas sum their gradients once per step.
                    self.model.set_requires_all_reduce(i == len(micros) - 1)  # type: ignore[operator]
                    self._accumulate(packed, counts, spec, on_policy, ctx, batch.ids[packed.index], readings)
                self._step(spec.total_updates, ctx.metrics, readings)
                if spec.entropy:
                    self.entropy.adapt(spec.entropy, tokens, self._over_workers)
        readings.read()
        if self.routers:
            self.routers.log(ctx.metrics, self._over_workers, spec.epochs * spec.mini_batches)

    def _pack(self, batch: Batch, index: Ints) -> Pack:
        packed = pack(batch, index) if len(index) else empty_pack()
        if self.vision:
            rows = Rows(batch.select(packed.index)) if len(index) else None
            packed = self.vision.complete(packed, rows) if rows else self.vision.with_smallest(packed)
        return packed.divided(self.sequences.rank, self.sequences.ranks).to(self.device)

    def _micro_batches(
        self, batch: Batch, minis: list[Ints], whole_groups: bool = False, count: AggregateBy = "sample"
    ) -> list[tuple[list[Ints], tuple[int, int]]]:
        """Splits each mini-batch into as many micro-batches on every rank; counts its tokens and samples on all."""
        model, budget = ModelTokens.of(batch), self.config.micro_tokens * self.layout.sp
        responses, samples = model.lengths, (model.lengths > 0).astype(np.int64)
        if count == "branch":
            s = Sequences.of(batch)
            samples = np.bincount(s.sample[s.model_tokens(model) > 0], minlength=len(batch))
        micros = [micro_batches(batch, m, budget, whole_groups) for m in minis]
        sums = torch.tensor([[int(responses[m].sum()), int(samples[m].sum())] for m in minis])
        most = torch.tensor([max(1, len(parts)) for parts in micros])
        sums, most = self._over_workers(sums), self._over_workers(most, dist.ReduceOp.MAX)
        nobody: Ints = np.empty(0, np.int64)
        return [
            (parts + [nobody] * (n - len(parts)), (tokens, samples))
            for parts, n, (tokens, samples) in zip(micros, most.tolist(), sums.tolist(), strict=True)
        ]

    def _over_workers(self, values: Tensor, reduce: Any = dist.ReduceOp.SUM) -> Tensor:
        """Reduces small integers over all workers; in a sum, those with the same samples count once."""
        if self.workers > 1:
            counts = reduce != dist.ReduceOp.SUM or self.sequences.rank == 0
            values = (values if counts else torch.zeros_like(values)).to(self.device)
            for group in fsdp.data_parallel(self.mesh).get_all_groups():
                dist.all_reduce(values, reduce, group=group)
        return values.cpu()

    def _accumulate(
        self,
        packed: Pack,
        counts: Counts,
        spec: UpdateSpec,
        on_policy: bool,
        ctx: Context,
        ids: Ints,
        readings: Readings,
    ) -> None:
        """Adds the gradient of one micro-batch, of the samples `ids`."""
        metrics = ctx.metrics
        with HostActivations() if self.config.offload_activations else nullcontext():
            outputs, *more = self.model(packed, self.temperature)
        count = len(packed.targets)
        if not count:
            (0.0 * outputs.sum()).backward()  # this rank still takes part in the collectives
            return
        entropy, *candidates = more or [None]
        theirs = packed.per_token.get(TEACHER_TOP_LOGPROBS)
        top = TopLogprobs(candidates[0], theirs) if candidates and theirs is not None else None
        per_token = {f: values for f, values in packed.per_token.items() if values.ndim == 1}
        tokens = Tokens(outputs, packed.responses, per_token, packed.per_sample, entropy, top)
        loss = _checked(spec.loss(tokens, **spec.constants), count)
        lengths = packed.sequences if spec.aggregate_by == "branch" else packed.responses
        weights = token_weights(spec.aggregate, lengths, counts, count).to(outputs.device)
        losses, logged = loss.per_token, dict(loss.metrics)
        factor, mask_metrics = _policy_weights(tokens, spec)
        if factor is not None:
            losses, logged = loss.corrected(factor), {**logged, **mask_metrics}
        total = (weights * losses).sum()
        if self.routers and (aux := self.routers.add(self.model.routing, packed, counts.tokens)) is not None:
            total = total + aux
        (total * self.workers).backward()  # FSDP takes the mean over ranks, and the weights are already global
        if entropy is not None:
            if spec.entropy:
                self.entropy.add(entropy)
            if on_policy:
                model_tokens, fields = packed.model_tokens, ("entropy", "trainer_logprobs")

                def record(read: Tensor) -> None:
                    columns = zip(fields, map(model_tokens.spread, read), strict=True)
                    ctx.record.sample(ids, dict(columns))

                readings.add(torch.stack((entropy, outputs)), record)
            logged = {f"{self.name}/entropy": entropy.detach()} | logged
        for name, values in logged.items():
            readings.metric(metrics, name, values.mean(), count)
        readings.metric(metrics, f"{self.name}/loss", total, reduce="sum")
        if on_policy and ROLLOUT in packed.per_token:
            theirs, ours = packed.per_token[ROLLOUT], outputs.detach()
            readings.metric(metrics, "rollout/mismatch_kl", kl("k3", theirs, ours).mean(), count)
            readings.metric(metrics, "rollout/mismatch_max", (theirs - ours).abs().max(), reduce="max")

    @torch.no_grad()
    def _step(self, total_updates: int, metrics: MetricLog, readings: Readings) -> None:
        """Makes one optimiser step with the accumulated gradient; one that is not finite is skipped.

        The optimiser itself clips and skips, by numbers that stay on the device.
        """
        optimizer: Any = self.optimizer
        fsdp.sum_replicated_grads(self.model.lm, self.tp_styles, self.mesh)
        norm = fsdp.grad_norm(self.trained, self.mesh)

        def log(read: Tensor) -> None:
            metrics.log(f"{self.name}/grad_norm", float(read))
            if not math.isfinite(float(read)):
                metrics.log(f"{self.name}/skipped_updates", 1 / self.layout.dp, reduce="sum")

        readings.add(norm, log)
        lr, clip = learning_rate(self.config, self.updates, total_updates), self.config.clip_grad
        metrics.log(f"{self.name}/lr", lr)
        for (_, p), shard in zip(self.trained, self.optimized, strict=True):
            shard.grad = None if p.grad is None else fsdp.local(p.grad)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.found_inf = norm.isfinite().logical_not().float()
        optimizer.grad_scale = (norm / clip).clamp(min=1).float() if clip > 0 else None  # gradients are divided by it
        optimizer.step()
        self.updates += 1
        if self.ema and self.updates % self.ema_every == 0:
            self.ema.update()
        # Their memory belongs to a stream of FSDP's, which waits for this one before it uses it again.
        self.model.zero_grad()
        optimizer.zero_grad()  # the shards are its own parameters'


def make_trainer(role: RoleContext, source: Source, layout: Layout, options: TrainerOptions) -> Trainer:
    """Makes the trainer of a role on this rank; its log-probs have the temperature of the rollout."""
    degree = shard_degree(options.config, layout, role.name)
    mesh = role.mesh(layout, None if degree == layout.without_sp.dp else degree)
    images = role.images if source.processor else None
    options = replace(options, temperature=role.rollout.temperature or 1.0, images=images)
    place = RankMesh(layout, mesh, role.rank, role.sequence_groups.get(layout))
    return Trainer(role.name, source, place, options)


def _prepared(batch: Batch, spec: UpdateSpec) -> Batch:
    """Adds fields for the loss: the old log-probs, those of the reference, and the pairs of samples to compare."""
    if spec.mask_truncated:
        batch = batch.select(np.flatnonzero(batch["finished"].numpy()))
    columns = dict(batch.columns)
    if REFERENCE not in columns and EMA_LOGPROBS in columns:
        columns[REFERENCE] = columns[EMA_LOGPROBS]
    old = spec.old_logprobs or (ROLLOUT if spec.several else OLD)
    if OLD not in batch and (spec.old_logprobs or old in batch):
        columns[OLD] = batch[old]
    if spec.whole_groups:
        columns["pair"] = torch.from_numpy(batch.groups)
    return Batch(batch.ids, batch.groups, columns)


def _policy_weights(tokens: Tokens, spec: UpdateSpec) -> tuple[Tensor | None, dict[str, Tensor]]:
    """Returns by what the policy terms of tokens are multiplied, if by anything, and metrics."""
    factors: list[Tensor] = []
    metrics: dict[str, Tensor] = {}
    for correction in (spec.correction, spec.rejection):
        if correction is None:
            continue
        old = tokens[OLD] if OLD in tokens else tokens.logprobs.detach()
        weights, more = correction.weights(old, tokens[ROLLOUT], tokens.lengths)
        factors.append(weights)
        metrics |= more
    if spec.mask_off_policy is not None:
        factors.append(off_policy_mask(tokens, spec.mask_off_policy))
        metrics["actor/off_policy_frac"] = 1 - factors[-1]
    if POLICY_MASK in tokens:
        factors.append(tokens[POLICY_MASK])
    return (math.prod(factors[1:], start=factors[0]) if factors else None), metrics


def _checked(loss: Any, tokens: int) -> Loss:
    """Refuses anything but one value per token: a single number would broadcast to every token."""
    if not isinstance(loss, Loss):
        raise ConfigError(f"the loss returned a {type(loss).__name__}; return distflow.Loss(per_token, metrics)")
    if loss.per_token.shape != (tokens,):
        raise ConfigError(
            f"the loss returned {list(loss.per_token.shape)} values for {tokens} tokens; return one per token,"
            " `aggregate` makes them one number"
        )
    return loss
