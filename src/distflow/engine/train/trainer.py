"""The training engine: a model sharded over its layout, its optimiser, what it says of tokens, and updates."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from distflow.algo.aggregate import Counts, Mode, token_weights
from distflow.algo.correction import Kind, correction
from distflow.algo.kl import kl
from distflow.algo.losses import Loss
from distflow.algo.tokens import Tokens
from distflow.config.schema import LearnConfig, LoraConfig
from distflow.data.balance import Ints
from distflow.data.batch import Batch, Ragged
from distflow.engine.cpu.train_ops import quicken
from distflow.engine.model import parallel
from distflow.engine.model.attention import Packed
from distflow.engine.model.lora import Adapter, Merged, pairs, plain
from distflow.engine.model.source import DTYPES, Read, Source
from distflow.engine.model.source import Kind as ModelKind
from distflow.engine.train.logprobs import token_logprobs
from distflow.engine.train.lr_schedule import learning_rate
from distflow.engine.train.packing import RESPONSE, ROLLOUT, Pack, micro_batches, nothing, pack
from distflow.engine.weights import Held, Spec, slices
from distflow.errors import ConfigError
from distflow.observe.metrics import StepMetrics
from distflow.plan.layout import Layout
from distflow.run.checkpoint import like, load_tensors, read_values
from distflow.run.export import WEIGHTS

MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's


class _Reader(nn.Module):
    """What FSDP wraps: a model, asked about the tokens of responses."""

    def __init__(self, lm: Any) -> None:
        super().__init__()
        self.lm = lm

    def _hidden(self, pack: Pack) -> Tensor:
        """[responses, hidden]: of the row before each response token."""
        hidden = self.lm.base_model(
            input_ids=pack.tokens[None],
            position_ids=pack.positions[None],
            use_cache=False,
            distflow=Packed(pack.lengths, pack.spread),
        ).last_hidden_state[0]
        # A pack without a response still passes through all layers, so that everybody takes part in the collectives.
        return hidden.index_select(0, pack.keep if len(pack.keep) else pack.keep.new_zeros(1))  # type: ignore[no-any-return]


class Scorer(_Reader):
    """Of a language model: log-prob and entropy of each token. The logits never leave it."""

    def forward(self, pack: Pack, temperature: float) -> tuple[Tensor, ...]:
        hidden = self._hidden(pack)
        head = self.lm.get_output_embeddings()
        targets = pack.targets if len(pack.targets) else pack.targets.new_zeros(1)
        softcap: float | None = getattr(self.lm.config.get_text_config(), "final_logit_softcapping", None)
        return token_logprobs(hidden, head.weight, head.bias, targets, temperature, softcap)


class Valuer(_Reader):
    """Of a model with one number for a head: the value of what stands before each token."""

    def forward(self, pack: Pack, temperature: float) -> tuple[Tensor, ...]:
        hidden = self._hidden(pack)
        return (self.lm.score(hidden).squeeze(-1).float().clone(),)  # FSDP warns of views


READERS: dict[ModelKind, type[_Reader]] = {"words": Scorer, "values": Valuer}


@dataclass(frozen=True)
class Recipe:
    """How an update goes about its samples. `loss` gives a value per token, `mode` says how they become one number."""

    loss: Callable[..., Loss]
    constants: Mapping[str, Any]
    mode: Mode
    horizon: int
    mini_batches: int = 1
    epochs: int = 1
    together: bool = False  # samples of one prompt are in one micro-batch: the loss compares them
    correction: tuple[Kind, float] | None = None  # of the rollout's log-probs; see distflow.algo.correction


class Trainer:
    """One rank's part of a model that `layout` trains, or only asks (`config` None). Parameters are float32 shards.

    `name` is what its metrics begin with. With `lora`, it is an adapter that is trained, and the model stays as it is.
    """

    def __init__(
        self,
        name: str,
        source: Source,
        layout: Layout,
        mesh: DeviceMesh,
        rank: int,
        temperature: float,
        micro_tokens: int,
        compute: str,
        config: LearnConfig | None,
        recompute: bool = False,
        lora: LoraConfig | None = None,
    ) -> None:
        self.name = name
        self.layout, self.mesh, self.config = layout, mesh, config
        self.device = torch.device(mesh.device_type)
        self.temperature, self.micro_tokens = temperature, micro_tokens
        self.dp_group, self.dp = mesh.get_group("dp"), layout.dp
        self.lead = layout.ranks.index(rank) % layout.tp == 0  # speaks for its tensor-parallel cell
        lm = source.skeleton()
        quicken(lm)
        self.cut = parallel.styles(lm, layout.tp, "placement")
        self.specs = parallel.specs(lm, self.cut)  # of the model, whether an adapter is beside it or not
        self.held = Held(layout, sharded=True)
        assert not (lora and layout.tp > 1)
        self.adapter = Adapter(lm, lora) if lora else None
        parallel.cut_for_training(lm, self.cut, mesh)
        if recompute:
            lm.gradient_checkpointing_enable({"use_reentrant": False})
            lm.train()
        self.model = READERS[source.kind](lm)
        if config is None:
            self.model.requires_grad_(False)
        parallel.shard(self.model, lm, mesh, DTYPES[compute])
        self._fill(source, rank)
        self.optimizer: torch.optim.AdamW | None = None
        self.updates = 0
        if config is not None:
            # The optimiser sees this rank's parts as plain tensors, which are the same memory.
            self.shards = [nn.Parameter(part) for part in self.parts().values()]
            matrices = [s for s, (spec, _) in zip(self.shards, self.named, strict=True) if len(spec.shape) > 1]
            vectors = [s for s, (spec, _) in zip(self.shards, self.named, strict=True) if len(spec.shape) <= 1]
            self.optimizer = torch.optim.AdamW(
                [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
                lr=config.lr,
                betas=config.betas,
                eps=config.eps,
                fused=True,
            )

    def parts(self) -> dict[str, Tensor]:
        """This rank's part of each parameter that is trained; of a model that is only asked, of each."""
        return _local(self.named)

    def weights(self) -> Mapping[str, Tensor]:
        """This rank's part of each parameter of the model, with what the adapter has learned. To be called by all."""
        if self.adapter is None:
            return _local(self.base)
        beside = pairs(self.adapter.with_whole_a(self.parts(), self.dp_group))
        return Merged(_local(self.base), beside, self.adapter.scale)

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What it takes to go on later: numbers, and this rank's shards of what is trained and of the optimiser's."""
        assert self.optimizer is not None
        tensors: dict[str, Tensor] = {}
        steps = 0
        for (spec, p), shard in zip(self.named, self.shards, strict=True):
            assert isinstance(p, DTensor)
            tensors[WEIGHTS + spec.name] = p.detach()
            if known := self.optimizer.state.get(shard):
                steps = int(known["step"])
                tensors |= {f"{key}.{spec.name}": like(p, known[key]) for key in MOMENTS}
        return {"updates": self.updates, "optimizer_steps": steps}, tensors

    def restore(self, folder: Path, group: dist.ProcessGroup | None) -> None:
        """As it was when its state was kept, in this layout or in another."""
        assert self.optimizer is not None
        values = read_values(folder)
        if values["optimizer_steps"]:
            for shard in self.shards:
                moments = {key: torch.zeros_like(shard) for key in MOMENTS}
                self.optimizer.state[shard] = {"step": torch.tensor(float(values["optimizer_steps"])), **moments}
        load_tensors(folder, self.state()[1], group)
        self.updates = values["updates"]

    def _fill(self, source: Source, rank: int) -> None:
        self.model._apply(lambda t: torch.empty_like(t, device=self.mesh.device_type) if t.is_meta else t)  # type: ignore[no-untyped-call]
        self.model.lm.tie_weights()
        # Now, while FSDP shows its shards; during a pass, and for the root until the next, it shows whole tensors.
        found = {plain(name): p for name, p in self.model.lm.named_parameters()}
        self.base = self.named = [(spec, found[spec.name]) for spec in self.specs]
        self._read(source.reader([s.name for s in self.specs]), rank)
        if self.adapter:
            self.named = [(spec, found[spec.name]) for spec in self.adapter.specs]
            self._read(self.adapter.at_first(source.seed), rank)

    @torch.no_grad()
    def _read(self, read: Read, rank: int) -> None:
        for spec, p in self.named:
            parallel.local(p).copy_(read(spec.name, slices(self.held.box(spec, rank))))

    @torch.no_grad()
    def ask(self, batch: Batch) -> Ragged:
        """What the model says of every response token: its log-prob, or a value."""
        lengths = batch[RESPONSE].lengths
        starts = np.cumsum(lengths) - lengths
        result = torch.empty(int(lengths.sum()))
        micros, _ = self._agree(batch, [np.arange(len(batch))])[0]
        for index in micros:
            packed = self._pack(batch, index)
            count = len(packed.targets)  # a pack without a response gives a value all the same
            values = self.model(packed, self.temperature)[0][:count].cpu()
            for i, part in zip(packed.index, values.split(packed.responses.tolist()), strict=True):
                result[starts[i] : starts[i] + len(part)] = part
        self.model.reshard()  # type: ignore[operator]
        return Ragged.packed(result, lengths)

    def update(self, batch: Batch, mini_of: Ints, recipe: Recipe, total_updates: int, metrics: StepMetrics) -> None:
        """Optimiser steps on the samples of each mini-batch (`mini_of`), `epochs` times over."""
        minis = [np.flatnonzero(mini_of == m) for m in range(recipe.mini_batches)]
        agreed = self._agree(batch, minis, recipe.together)
        for epoch in range(recipe.epochs):
            for k, (micros, counts) in enumerate(agreed):
                fresh = epoch == k == 0  # the weights are still those that generated
                for index in micros:
                    self._accumulate(batch, index, Counts(*counts, recipe.horizon), recipe, fresh, metrics)
                self._step(total_updates, metrics)

    def _pack(self, batch: Batch, index: Ints) -> Pack:
        return (pack(batch, index) if len(index) else nothing()).to(self.device)

    def _agree(
        self, batch: Batch, minis: list[Ints], together: bool = False
    ) -> list[tuple[list[Ints], tuple[int, int]]]:
        """Micro-batches of each mini-batch, as many on every rank, and its tokens and samples over all ranks."""
        responses = batch[RESPONSE].lengths
        micros = [micro_batches(batch, m, self.micro_tokens, together) for m in minis]
        sums = torch.tensor([[int(responses[m].sum()), int((responses[m] > 0).sum())] for m in minis])
        most = torch.tensor([max(1, len(parts)) for parts in micros])
        if self.dp > 1:
            sums, most = sums.to(self.device), most.to(self.device)
            dist.all_reduce(sums, group=self.dp_group)
            dist.all_reduce(most, dist.ReduceOp.MAX, group=self.dp_group)
        nobody: Ints = np.empty(0, np.int64)
        return [
            (parts + [nobody] * (int(n) - len(parts)), (int(tokens), int(samples)))
            for parts, n, (tokens, samples) in zip(micros, most, sums.tolist(), strict=True)
        ]

    def _accumulate(
        self, batch: Batch, index: Ints, counts: Counts, recipe: Recipe, fresh: bool, metrics: StepMetrics
    ) -> None:
        """Add the gradient of some samples."""
        packed = self._pack(batch, index)
        said, *more = self.model(packed, self.temperature)
        count = len(packed.targets)
        if not count:
            (0.0 * said.sum()).backward()
            return
        entropy = more[0] if more else None
        tokens = Tokens(said, packed.responses, packed.per_token, packed.per_sample, entropy)
        loss = _checked(recipe.loss(tokens, **recipe.constants), count)
        weights = token_weights(recipe.mode, packed.responses, counts).to(said.device)
        per_token = dict(loss.metrics)
        if recipe.correction:
            kind, limit = recipe.correction
            old = tokens["old_logprobs"] if "old_logprobs" in tokens else said.detach()
            factor, told = correction(kind, old, tokens[ROLLOUT], packed.responses, limit)
            weights, per_token = weights * factor, {**per_token, **told}
        total = (weights * loss.per_token).sum()
        (total * self.dp).backward()  # FSDP takes the mean over ranks, and the weights are already global
        for name, values in per_token.items():
            metrics.log(name, float(values.mean()), count)
        if entropy is not None and f"{self.name}/entropy" not in per_token:
            metrics.log(f"{self.name}/entropy", float(entropy.detach().mean()), count)
        if self.lead:
            metrics.log(f"{self.name}/loss", float(total.detach()), reduce="sum")
        if fresh and ROLLOUT in packed.per_token:
            theirs, ours = packed.per_token[ROLLOUT], said.detach()
            metrics.log("rollout/mismatch_kl", float(kl("k3", theirs, ours).mean()), count)
            metrics.log("rollout/mismatch_max", float((theirs - ours).abs().max()), reduce="max")

    @torch.no_grad()
    def _step(self, total_updates: int, metrics: StepMetrics) -> None:
        assert self.config is not None
        assert self.optimizer is not None
        parallel.sum_shared_grads(self.model.lm, self.cut, self.mesh)
        norm = float(parallel.grad_norm(self.named, self.mesh))
        metrics.log(f"{self.name}/grad_norm", norm)
        lr = learning_rate(self.config, self.updates, total_updates)
        metrics.log(f"{self.name}/lr", lr)
        if math.isfinite(norm):
            for (_, p), shard in zip(self.named, self.shards, strict=True):
                shard.grad = None if p.grad is None else parallel.local(p.grad)
            if norm > self.config.clip_grad > 0:
                grads = [s.grad for s in self.shards if s.grad is not None]
                torch._foreach_mul_(grads, self.config.clip_grad / norm)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        else:
            metrics.log(f"{self.name}/skipped_updates", 1 / len(self.layout.ranks), reduce="sum")
        self.updates += 1
        self.model.zero_grad()


def _local(parameters: Iterable[tuple[Spec, Tensor]]) -> dict[str, Tensor]:
    return {spec.name: parallel.local(p.detach()) for spec, p in parameters}


def _checked(loss: Any, tokens: int) -> Loss:
    """What a loss has returned; one number for all would pass as that of every token."""
    if not isinstance(loss, Loss):
        raise ConfigError(f"the loss returned a {type(loss).__name__}; return distflow.Loss(per_token, metrics)")
    if loss.per_token.shape != (tokens,):
        raise ConfigError(
            f"the loss returned {list(loss.per_token.shape)} values for {tokens} tokens; return one per token,"
            " `aggregate` makes them one number"
        )
    return loss
