"""Tensor parallelism: the layers that are cut, and how, for training and for generation."""

import re
from collections.abc import Mapping

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from transformers import PreTrainedModel, Qwen3Config

from distflow.errors import ConfigError
from distflow.model.experts import EXPERTS, TP_DIMS, ExpertsParallel, experts_blocks
from distflow.weights.shards import TensorSpec

# A whole weight that each rank uses for its own heads only: its gradients are parts of a sum.
REPLICATED = "replicated_with_grad_allreduce"
_STACKED_EXPERTS = "moe_tp_experts"  # transformers' name for EXPERTS; it plans their stacked matrices apart
EMBEDDING = "embedding_rowwise"  # some versions of transformers plan to cut tied embeddings, which are left whole here

_LIKE = {"qwen3_vl_text": Qwen3Config.base_model_tp_plan}  # models without a plan of their own


def tp_styles(model: PreTrainedModel, tp: int, where: str) -> dict[str, str]:
    """Returns module → `colwise`, `rowwise`, REPLICATED or EXPERTS, as transformers plans it for this model."""
    config = model.config.get_text_config()
    plan: Mapping[str, str] = getattr(config, "base_model_tp_plan", None) or _LIKE.get(config.model_type, {})
    given = {name: style for name, style in plan.items() if style != EMBEDDING}
    if experts_blocks(model):
        given = {n: EXPERTS if s == _STACKED_EXPERTS else s for n, s in given.items() if ".experts." not in n}
    known = {"colwise", "rowwise", REPLICATED, EXPERTS}
    if not given or not set(given.values()) <= known:
        if tp == 1:
            return {}
        raise ConfigError(f"{where}: tensor parallelism is not known for {config.model_type} models; use tp 1")
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size"):
        count = getattr(config, key, None) or tp
        if count % tp:
            raise ConfigError(f"{where}: tp {tp} does not divide the model's {key}, {count}; use a tp that does")
    decoder = model.get_decoder()
    prefix = re.escape(next(name for name, module in model.named_modules() if module is decoder) + ".")
    patterns = {re.compile(prefix + re.escape(k).replace(r"\*", r"\d+")): v for k, v in given.items()}
    return {
        name: style
        for name, _ in model.named_modules()
        for pattern, style in patterns.items()
        if pattern.fullmatch(name)
    }


def parameter_specs(model: PreTrainedModel, styles: Mapping[str, str]) -> list[TensorSpec]:
    """Returns all parameters; shared ones once, under their first name."""
    specs = []
    for name, p in model.named_parameters():
        module, _, kind = name.rpartition(".")
        style = styles.get(module)
        dim = 0 if style == "colwise" else 1 if style == "rowwise" and kind == "weight" else None
        if style == EXPERTS:
            dim = TP_DIMS[kind]
        specs.append(TensorSpec(name, tuple(p.shape), dim))
    return specs


def parallelize_for_training(model: PreTrainedModel, styles: Mapping[str, str], mesh: DeviceMesh) -> None:
    """Turns the parameters of cut layers into DTensors."""
    if mesh["tp"].size() > 1:
        kinds = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel, EXPERTS: ExpertsParallel}
        plan: dict[str, ParallelStyle] = {n: kinds[style]() for n, style in styles.items() if style != REPLICATED}
        parallelize_module(model, mesh["tp"], plan)


class RowwiseAllReduce:
    """Tensor parallelism for a model whose parameters are plain tensors, already cut: sums after row-wise layers, and
    after experts."""

    def __init__(self, model: PreTrainedModel, styles: Mapping[str, str], process_group: dist.ProcessGroup) -> None:
        self.process_group = process_group
        for name, style in styles.items():
            if style in ("rowwise", EXPERTS):
                model.get_submodule(name).register_forward_hook(self._sum)

    def _sum(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        bias = getattr(module, "bias", None)
        if bias is not None and dist.get_rank(self.process_group):
            output = output - bias  # rank 0 has added it
        output = output.contiguous()
        dist.all_reduce(output, group=self.process_group)
        return output
