"""The trainer: a model sharded over its layout, its optimiser, inference on response tokens, and updates."""

import math
from collections.abc import Mapping
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
from distflow.algo.tokens import Tokens
from distflow.batch.batch import Batch, Ragged
from distflow.batch.context import Context, MetricLog
from distflow.batch.response_mask import ModelTokens
from distflow.config.schema import LoraConfig, TrainerConfig
from distflow.cpu.train_ops import use_cpu_modules
from distflow.errors import ConfigError
from distflow.model.lora import LoraAdapter, MergedWeights, adapter_pairs, base_name
from distflow.model.source import DTYPES, Read, Source
from distflow.model.tensor_parallel import parallelize_for_training, parameter_specs, tp_styles
from distflow.plan.layout import Layout
from distflow.roles.context import RoleContext, shard_degree
from distflow.train import fsdp
from distflow.train.ema import Ema
from distflow.train.heads import HEADS
from distflow.train.lr_schedule import learning_rate
from distflow.train.packing import RESPONSE, ROLLOUT, Pack, empty_pack, micro_batches, pack
from distflow.train.update_spec import UpdateSpec
from distflow.util.arrays import Ints
from distflow.weights.shards import Shards, TensorSpec, slices
from distflow.weights.state import EMA, WEIGHTS, RoleState

OLD = "old_logprobs"
MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's


@dataclass(frozen=True)
class RankMesh:
    """The place of a rank in a layout, and the layout's device mesh."""

    layout: Layout
    mesh: DeviceMesh
    rank: int


@dataclass(frozen=True)
class TrainerOptions:
    """How a model is trained, or only run, if it is not `trainable`."""

    config: TrainerConfig
    trainable: bool = True
    lora: LoraConfig | None = None  # with one, only the adapter is trained
    ema: float | None = None  # the decay of a moving average of what is trained
    temperature: float = 1.0  # of the log-probs


class Trainer:
    """One rank's part of a model. Its parameters are float32 shards; `name` is the prefix of its metrics."""

    def __init__(self, name: str, source: Source, place: RankMesh, options: TrainerOptions) -> None:
        layout, mesh, rank = place.layout, place.mesh, place.rank
        config, trainable, lora = options.config, options.trainable, options.lora
        self.name, self.source, self.layout, self.mesh, self.config = name, source, layout, mesh, config
        self.trainable, self.temperature = trainable, options.temperature
        self.device = torch.device(mesh.device_type)
        self.dp = layout.dp
        lm = source.skeleton()
        if self.device.type == "cpu":
            use_cpu_modules(lm)
        self.tp_styles = tp_styles(lm, layout.tp, "placement")
        self.specs = parameter_specs(lm, self.tp_styles)  # of the model, with or without an adapter
        self.shards = Shards(layout, fsdp.sharding(mesh).size())
        assert not (lora and layout.tp > 1)
        self.adapter = LoraAdapter(lm, lora, self.tp_styles) if lora else None
        parallelize_for_training(lm, self.tp_styles, mesh)
        if config.gradient_checkpointing and trainable:
            lm.gradient_checkpointing_enable({"use_reentrant": False})
            lm.train()
        self.model = HEADS[source.head](lm)
        if not trainable:
            self.model.requires_grad_(False)
        fsdp.shard(self.model, lm, mesh, DTYPES[config.dtype])
        self._materialize(rank)
        self.updates = 0  # optimiser steps so far
        self.optimizer = self._make_optimizer() if trainable else None
        self.ema: Ema | None = None
        if options.ema is not None:
            self.ema = Ema(options.ema, {spec.name: fsdp.local(p.detach()) for spec, p in self.trained})

    def _materialize(self, rank: int) -> None:
        """Allocates this rank's shards and reads the weights into them."""
        self.model._apply(lambda t: torch.empty_like(t, device=self.mesh.device_type) if t.is_meta else t)  # type: ignore[no-untyped-call]
        self.model.lm.tie_weights()
        # Now, as FSDP shows whole tensors during a pass and, for the root, until the next.
        parameters = {base_name(name): p for name, p in self.model.lm.named_parameters()}
        self.base = self.trained = [(spec, parameters[spec.name]) for spec in self.specs]
        self._read(self.source.reader({s.name: s.shape for s in self.specs}), rank)
        if self.adapter:
            self.trained = [(spec, parameters[spec.name]) for spec in self.adapter.specs]
            self._read(self.adapter.initial_weights(self.source.seed), rank)

    @torch.no_grad()
    def _read(self, read: Read, rank: int) -> None:
        for spec, p in self.trained:
            fsdp.local(p).copy_(read(spec.name, slices(self.shards.box(spec, rank))))

    def _make_optimizer(self) -> torch.optim.AdamW:
        # The optimiser sees this rank's shards as plain tensors in the same memory.
        self.optimized = [nn.Parameter(shard) for shard in fsdp.local_shards(self.trained).values()]
        decay: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for (spec, _), shard in zip(self.trained, self.optimized, strict=True):
            decay[len(spec.shape) > 1].append(shard)
        config = self.config
        groups = [
            {"params": decay[True], "weight_decay": config.weight_decay},
            {"params": decay[False], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)

    def weights(self) -> Mapping[str, Tensor]:
        """Returns this rank's shard of each parameter, with the adapter merged. All ranks call it together."""
        if self.adapter is None:
            return self.base_weights()
        shards = self.adapter.gather_a(fsdp.local_shards(self.trained), fsdp.sharding(self.mesh).get_group())
        return MergedWeights(self.base_weights(), adapter_pairs(shards), self.adapter.scale)

    def base_weights(self) -> Mapping[str, Tensor]:
        """Returns this rank's shard of each parameter, without the adapter."""
        return fsdp.local_shards(self.base)

    def adapter_weights(self) -> Mapping[str, Tensor]:
        """Returns this rank's shards of the adapter alone, as engines add it: B is scaled."""
        assert self.adapter is not None
        return self.adapter.scaled(fsdp.local_shards(self.trained))

    def state(self) -> RoleState:
        """Returns the state for a checkpoint: numbers, and this rank's shards of trained parameters and moments."""
        assert self.optimizer is not None
        tensors: dict[str, Tensor] = {}
        specs: dict[str, TensorSpec] = {}
        steps = 0
        for (spec, p), shard in zip(self.trained, self.optimized, strict=True):
            shards = {WEIGHTS: fsdp.local(p.detach())}
            if state := self.optimizer.state.get(shard):
                steps = int(state["step"])
                shards |= {f"{key}.": state[key] for key in MOMENTS}
            if self.ema:
                shards[EMA] = self.ema.shards[spec.name]
            tensors |= {prefix + spec.name: tensor for prefix, tensor in shards.items()}
            specs |= {prefix + spec.name: spec for prefix in shards}
        return RoleState({"updates": self.updates, "optimizer_steps": steps}, tensors, specs, self.shards)

    def restore(self, values: Mapping[str, Any]) -> None:
        """Takes up the numbers of a state, and makes the moments that it has: `state` then returns all its tensors."""
        assert self.optimizer is not None
        if values["optimizer_steps"]:
            for shard in self.optimized:
                moments = {key: torch.zeros_like(shard) for key in MOMENTS}
                # Fused AdamW needs the count where the shard is.
                steps = torch.tensor(float(values["optimizer_steps"]), device=shard.device)
                self.optimizer.state[shard] = {"step": steps, **moments}
        self.updates = values["updates"]

    @torch.no_grad()
    def infer(self, batch: Batch) -> Ragged:
        """Returns the log-prob of every response token, or its value, in the order of the batch; 0 for masked ones."""
        lengths = batch[RESPONSE].lengths
        starts = np.cumsum(lengths) - lengths
        result = torch.empty(int(lengths.sum()))
        micros, _ = self._micro_batches(batch, [np.arange(len(batch))])[0]
        for index in micros:
            packed = self._pack(batch, index)
            count = len(packed.targets)  # a pack without a response still has an output
            outputs = self.model(packed, self.temperature)[0][:count].cpu()
            for i, part in zip(packed.index, packed.model_tokens.spread(outputs), strict=True):
                result[starts[i] : starts[i] + len(part)] = part
        self.model.reshard()  # type: ignore[operator]
        return Ragged.packed(result, lengths)

    def update(self, batch: Batch, spec: UpdateSpec, ctx: Context) -> None:
        """Makes the optimiser steps of one step: each mini-batch of its prompts, `epochs` times."""
        batch = _prepared(batch, spec)
        # Round-robin: ranks hold consecutive prompts, and each should have a share of every mini-batch.
        mini_batch = np.searchsorted(ctx.groups, batch.groups) % spec.mini_batches
        minis = [np.flatnonzero(mini_batch == m) for m in range(spec.mini_batches)]
        agreed = self._micro_batches(batch, minis, spec.whole_groups)
        for epoch in range(spec.epochs):
            for k, (micros, (tokens, samples)) in enumerate(agreed):
                counts, on_policy = Counts(tokens, samples, spec.horizon), epoch == k == 0
                for index in micros:
                    packed = self._pack(batch, index)
                    self._accumulate(packed, counts, spec, on_policy, ctx, batch.ids[packed.index])
                self._step(spec.total_updates, ctx.metrics)

    def _pack(self, batch: Batch, index: Ints) -> Pack:
        return (pack(batch, index) if len(index) else empty_pack()).to(self.device)

    def _micro_batches(
        self, batch: Batch, minis: list[Ints], whole_groups: bool = False
    ) -> list[tuple[list[Ints], tuple[int, int]]]:
        """Splits each mini-batch into as many micro-batches on every rank; counts its tokens and samples on all."""
        responses, budget = ModelTokens.of(batch).lengths, self.config.micro_tokens
        micros = [micro_batches(batch, m, budget, whole_groups) for m in minis]
        sums = torch.tensor([[int(responses[m].sum()), int((responses[m] > 0).sum())] for m in minis])
        most = torch.tensor([max(1, len(parts)) for parts in micros])
        if self.dp > 1:
            sums, most = sums.to(self.device), most.to(self.device)
            for group in fsdp.data_parallel(self.mesh).get_all_groups():
                dist.all_reduce(sums, group=group)
                dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
        nobody: Ints = np.empty(0, np.int64)
        return [
            (parts + [nobody] * (n - len(parts)), (tokens, samples))
            for parts, n, (tokens, samples) in zip(micros, most.tolist(), sums.tolist(), strict=True)
        ]

    def _accumulate(
        self, packed: Pack, counts: Counts, spec: UpdateSpec, on_policy: bool, ctx: Context, ids: Ints
    ) -> None:
        """Adds the gradient of one micro-batch, of the samples `ids`."""
        metrics = ctx.metrics
        outputs, *more = self.model(packed, self.temperature)
        count = len(packed.targets)
        if not count:
            (0.0 * outputs.sum()).backward()  # this rank still takes part in the collectives
            return
        entropy = more[0] if more else None
        tokens = Tokens(outputs, packed.responses, packed.per_token, packed.per_sample, entropy)
        loss = _checked(spec.loss(tokens, **spec.constants), count)
        weights = token_weights(spec.aggregate, packed.responses, counts).to(outputs.device)
        per_token, logged = loss.per_token, dict(loss.metrics)
        if spec.correction:
            old = tokens[OLD] if OLD in tokens else outputs.detach()
            factor, correction_metrics = spec.correction.weights(old, tokens[ROLLOUT], packed.responses)
            per_token, logged = loss.corrected(factor), {**logged, **correction_metrics}
        total = (weights * per_token).sum()
        (total * self.dp).backward()  # FSDP takes the mean over ranks, and the weights are already global
        if entropy is not None:
            if on_policy:
                per_sample = {"entropy": entropy.detach(), "trainer_logprobs": outputs.detach()}
                ctx.record.sample(ids, {f: packed.model_tokens.spread(v) for f, v in per_sample.items()})
            logged = {f"{self.name}/entropy": entropy.detach()} | logged
        for name, values in logged.items():
            metrics.log(name, float(values.mean()), count)
        metrics.log(f"{self.name}/loss", float(total.detach()), reduce="sum")
        if on_policy and ROLLOUT in packed.per_token:
            theirs, ours = packed.per_token[ROLLOUT], outputs.detach()
            metrics.log("rollout/mismatch_kl", float(kl("k3", theirs, ours).mean()), count)
            metrics.log("rollout/mismatch_max", float((theirs - ours).abs().max()), reduce="max")

    @torch.no_grad()
    def _step(self, total_updates: int, metrics: MetricLog) -> None:
        """Makes one optimiser step with the accumulated gradient; one that is not finite is skipped."""
        assert self.optimizer is not None
        fsdp.sum_replicated_grads(self.model.lm, self.tp_styles, self.mesh)
        norm = float(fsdp.grad_norm(self.trained, self.mesh))
        metrics.log(f"{self.name}/grad_norm", norm)
        lr = learning_rate(self.config, self.updates, total_updates)
        metrics.log(f"{self.name}/lr", lr)
        if math.isfinite(norm):
            for (_, p), shard in zip(self.trained, self.optimized, strict=True):
                shard.grad = None if p.grad is None else fsdp.local(p.grad)
            if norm > self.config.clip_grad > 0:
                grads = [s.grad for s in self.optimized if s.grad is not None]
                torch._foreach_mul_(grads, self.config.clip_grad / norm)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
            if self.ema:
                self.ema.update()
        else:
            metrics.log(f"{self.name}/skipped_updates", 1 / self.dp, reduce="sum")
        self.updates += 1
        self.model.zero_grad()


def make_trainer(role: RoleContext, source: Source, layout: Layout, options: TrainerOptions) -> Trainer:
    """Makes the trainer of a role on this rank; its log-probs have the temperature of the rollout."""
    degree = shard_degree(options.config, layout, role.name)
    mesh = role.meshes[layout] if degree == layout.dp else role.hybrid_mesh(layout, degree)
    options = replace(options, temperature=role.rollout.temperature or 1.0)
    return Trainer(role.name, source, RankMesh(layout, mesh, role.rank), options)


def _prepared(batch: Batch, spec: UpdateSpec) -> Batch:
    """Adds fields for the loss: the old log-probs, and the pairs of samples to compare."""
    columns = dict(batch.columns)
    old = spec.old_logprobs or (ROLLOUT if spec.several else OLD)
    if OLD not in batch and (spec.old_logprobs or old in batch):
        columns[OLD] = batch[old]
    if spec.whole_groups:
        columns["pair"] = torch.from_numpy(batch.groups)
    return Batch(batch.ids, batch.groups, columns)


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
