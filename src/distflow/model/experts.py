"""Mixtures of experts: blocks in place of transformers' own, by which a model is trained and generates alike.

The matrices of all experts of a layer are stacked; gate and up are apart, so that tensor parallelism cuts each of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn.functional import grouped_mm
from transformers import PreTrainedModel

from distflow.config.schema import MIXTURES
from distflow.cpu.products import linear

PROMPT_EXPERTS, RESPONSE_EXPERTS = "prompt_experts", "response_experts"  # fields: [tokens, layers, top-k]
EXPERTS = "experts"  # how tensor parallelism cuts the module of that name: each expert, not the set of them
TP_DIMS = {"gate_proj": 1, "up_proj": 1, "down_proj": 2}  # by matrix: the dimension of the intermediate size


@dataclass
class Routing:
    """The input and the choices of the routers of one forward pass; each list has an entry per layer."""

    keeps: bool = False  # the lists are filled
    replay: Tensor | None = None  # [tokens, layers, top-k]: experts to use; a token with negative ones has its own
    logits: list[Tensor] = field(default_factory=list)  # [tokens, experts]
    own: list[Tensor] = field(default_factory=list)  # [tokens, top-k]: what the router would choose by itself
    chosen: list[Tensor] = field(default_factory=list)  # [tokens, top-k]: what was used


class Experts(nn.Module):
    """The experts of a layer: gated MLPs."""

    def __init__(self, theirs: Any) -> None:
        super().__init__()
        experts, inner, hidden = theirs.num_experts, theirs.intermediate_dim, theirs.hidden_dim
        like, self.act_fn = theirs.down_proj, theirs.act_fn
        self.gate_proj = nn.Parameter(like.new_empty(experts, inner, hidden))
        self.up_proj = nn.Parameter(like.new_empty(experts, inner, hidden))
        self.down_proj = nn.Parameter(like.new_empty(experts, hidden, inner))

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Returns, for each row of x [n, hidden], the sum of its `chosen` experts' outputs [n, top-k] by `weights`."""
        gate, up, down = (p.to_local() if isinstance(p, DTensor) else p for p in self.parameters())
        rows, k = chosen.shape
        # Sorted by expert; unsorted again before the sum, whose order does not depend on the other rows then.
        by_expert, order = chosen.flatten().sort(stable=True)
        ends = torch.searchsorted(by_expert, torch.arange(len(gate), device=x.device), right=True, out_int32=True)
        each = x[:, None].expand(-1, k, -1).reshape(rows * k, -1).index_select(0, order)
        inner = self.gated(self.product(each, gate, ends), self.product(each, up, ends))
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
        out = self.product(inner, down, ends).index_select(0, back).view(rows, k, -1)
        return (out * weights[..., None]).sum(1).to(x.dtype)

    def product(self, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        """Multiplies the rows of x [n, in] up to each of `ends` by one matrix of weight [experts, out, in]."""
        return grouped_mm(x, weight.transpose(1, 2), offs=ends)

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.act_fn(gate) * up  # type: ignore[no-any-return]


class ExpertsBlock(nn.Module):
    """A router and the experts that it chooses from; its parameters are found where transformers' block has them."""

    def __init__(self, theirs: Any, layer: int) -> None:
        super().__init__()
        self.gate, self.experts, self.layer = theirs.gate, Experts(theirs.experts), layer
        self.normalised = getattr(theirs.gate, "norm_topk_prob", True)
        self.routing = Routing()  # of the present pass, and of its second forward pass if activations are recomputed

    def forward(self, hidden: Tensor) -> Tensor:
        x, routing = hidden.flatten(0, -2), self.routing
        logits = linear(x, self.gate.weight, None)
        probs = logits.softmax(-1, dtype=torch.float32)
        own = chosen = probs.topk(self.gate.top_k, -1).indices
        if routing.replay is not None:
            given = routing.replay[:, self.layer].to(own.dtype)
            chosen = torch.where(given >= 0, given, own)
        weights = probs.gather(-1, chosen)
        if self.normalised:
            weights = weights / weights.sum(-1, keepdim=True)
        if routing.keeps and len(routing.logits) == self.layer:  # not a second forward pass
            routing.logits.append(logits)
            routing.own.append(own)
            routing.chosen.append(chosen)
        return self.experts(x, chosen, weights.to(logits.dtype)).view_as(hidden)  # type: ignore[no-any-return]


class ExpertsParallel(ParallelStyle):
    """Cuts each expert, as column-wise and row-wise layers are cut; every rank has a part of all experts."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, dim in TP_DIMS.items():
            whole = module.get_parameter(name)
            module.register_parameter(name, nn.Parameter(distribute_tensor(whole, device_mesh, [Shard(dim)])))

        def before(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            x, chosen, weights = inputs
            return _whole(x, device_mesh), chosen, _whole(weights, device_mesh)

        def after(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            parts = DTensor.from_local(output, device_mesh, [Partial()], run_check=False)
            return parts.redistribute(placements=[Replicate()]).to_local()

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)
        return module


def _whole(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Returns x, which all ranks have, so that the gradients of their parts of the work are added."""
    return DTensor.from_local(x, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])


def use_experts_blocks(model: PreTrainedModel) -> None:
    """Replaces the sparse blocks of a model, which is on the meta device."""
    if model.config.get_text_config().model_type not in MIXTURES:
        return
    sparse = [m for m in model.modules() if isinstance(getattr(getattr(m, "mlp", None), "experts", None), nn.Module)]
    for layer, module in enumerate(sparse):
        module.mlp = ExpertsBlock(module.mlp, layer)


def experts_blocks(model: nn.Module) -> Sequence[ExpertsBlock]:
    """Returns the sparse blocks of a model, in the order of its layers; none if it is dense."""
    return [m for m in model.modules() if isinstance(m, ExpertsBlock)]
