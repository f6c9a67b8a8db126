"""One model over many workers: tensor parallel within a cell, FSDP2 across cells."""

import re
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from transformers import PreTrainedModel

from distflow.engine.weights import Spec
from distflow.errors import ConfigError

UNIT = 32 << 20  # bytes of parameters that are gathered together, at least
_REPLICATED = "replicated_with_grad_allreduce"  # a whole weight, used by each rank for its own heads only


def styles(model: PreTrainedModel, tp: int, where: str) -> dict[str, str]:
    """Module → how tensor parallelism cuts it (`colwise`, `rowwise`, …), as transformers plans it for this model."""
    config = model.config.get_text_config()
    given: Mapping[str, str] | None = getattr(config, "base_model_tp_plan", None)
    known = {"colwise", "rowwise", _REPLICATED}
    if not given or not set(given.values()) <= known:
        if tp == 1:
            return {}
        raise ConfigError(f"{where}: tensor parallelism is not known for {config.model_type} models; use tp 1")
    for what in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        count = getattr(config, what, tp)
        if count % tp:
            raise ConfigError(f"{where}: tp {tp} does not divide the model's {what}, {count}; use a tp that does")
    prefix = re.escape(model.base_model_prefix + ".")
    patterns = {re.compile(prefix + re.escape(k).replace(r"\*", r"\d+")): v for k, v in given.items()}
    return {
        name: style
        for name, _ in model.named_modules()
        for pattern, style in patterns.items()
        if pattern.fullmatch(name)
    }


def specs(model: PreTrainedModel, cut: Mapping[str, str]) -> list[Spec]:
    """All parameters; one that two modules share is there once, under its first name."""
    result = []
    for name, p in model.named_parameters():
        module, _, kind = name.rpartition(".")
        style = cut.get(module)
        dim = 0 if style == "colwise" else 1 if style == "rowwise" and kind == "weight" else None
        result.append(Spec(name, tuple(p.shape), dim))
    return result


def cut_for_training(model: PreTrainedModel, cut: Mapping[str, str], mesh: DeviceMesh) -> None:
    if mesh["tp"].size() > 1:
        made: dict[str, ParallelStyle] = {
            n: ColwiseParallel() if s == "colwise" else RowwiseParallel() for n, s in cut.items() if s != _REPLICATED
        }
        parallelize_module(model, mesh["tp"], made)


def shard(root: nn.Module, model: PreTrainedModel, mesh: DeviceMesh, compute: torch.dtype) -> None:
    """FSDP2 over the data-parallel dimension, some layers at a time; `root` is what is called."""
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    for unit in units(model):
        fully_shard(unit, mesh=mesh["dp"], mp_policy=policy)
    fully_shard(root, mesh=mesh["dp"], mp_policy=policy, reshard_after_forward=False)


def units(model: PreTrainedModel) -> list[list[nn.Module]]:
    """Layers whose parameters are gathered together. For a few small ones one exchange with everything is faster than
    one for each, in which workers would also wait for each other; they are left to what is around them."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    found: list[list[nn.Module]] = []
    room = 0
    for layer in (m for m in model.modules() if type(m).__name__ in names):
        if room <= 0:
            found.append([])
            room = UNIT
        found[-1].append(layer)
        room -= sum(p.numel() * p.element_size() for p in layer.parameters())
    return found if len(found) > 1 or room <= 0 else []


def local(p: Tensor) -> Tensor:
    """The part of a parameter, or of its gradient, that this worker has."""
    return p.to_local() if isinstance(p, DTensor) else p


class CutInPlace:
    """Tensor parallelism for a model whose parameters are plain tensors, already cut: sums after row-wise layers."""

    def __init__(self, model: PreTrainedModel, cut: Mapping[str, str], group: dist.ProcessGroup) -> None:
        self.group = group
        for name, style in cut.items():
            if style == "rowwise":
                model.get_submodule(name).register_forward_hook(self._sum)

    def _sum(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        bias = getattr(module, "bias", None)
        if bias is not None and dist.get_rank(self.group):
            output = output - bias  # it is to be added once
        output = output.contiguous()
        dist.all_reduce(output, group=self.group)
        return output


def grad_norm(parameters: Iterable[tuple[Spec, Tensor]], mesh: DeviceMesh) -> Tensor:
    """The norm of the whole gradient, whatever it is cut into; in float64, so that the cut hardly shows."""
    # Of what tensor parallelism cuts, of what it does not.
    squares = torch.zeros(2, dtype=torch.float64, device=mesh.device_type)
    for spec, p in parameters:
        if p.grad is not None:
            squares[int(spec.tp_dim is None)] += local(p.grad).double().square().sum()
    dist.all_reduce(squares, group=mesh.get_group("dp"))
    cut = squares[:1].clone()
    if mesh["tp"].size() > 1:
        dist.all_reduce(cut, group=mesh.get_group("tp"))
    return (cut[0] + squares[1]).sqrt()


def sum_shared_grads(model: nn.Module, cut: Mapping[str, str], mesh: DeviceMesh) -> None:
    """Whole weights that each rank used for its own heads: their gradients are parts of a sum."""
    for name, style in cut.items():
        if style == _REPLICATED and mesh["tp"].size() > 1:
            for p in model.get_submodule(name).parameters():
                if p.grad is not None:
                    dist.all_reduce(local(p.grad), group=mesh.get_group("tp"))
