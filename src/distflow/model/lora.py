"""LoRA: low-rank matrices B and A of linear layers, so that W + scale · B @ A is trained through them alone.

PEFT injects them, so that names and files are PEFT's; sharding and merging for the rollout are done here.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping
from copy import copy
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from distflow.config.schema import ALL_LINEAR, LoraConfig
from distflow.cpu import kernels_for
from distflow.cpu.products import multiply
from distflow.errors import ConfigError, suggest
from distflow.model.source import Read
from distflow.util.extras import how_to_install
from distflow.weights.shards import TensorSpec

_A, _B, _WEIGHT = ".lora_A.default.weight", ".lora_B.default.weight", ".weight"
_CUT = {"colwise": "lora_B", "rowwise": "lora_A"}
Pairs = Mapping[str, tuple[Tensor, Tensor]]  # weight → B and A


class LoraAdapter:
    """Injects an adapter into `lm`, which is on the meta device, and freezes the rest.

    `styles`: how tensor parallelism cuts the layers, for an engine that does not merge the adapter.
    """

    def __init__(self, lm: PreTrainedModel, given: LoraConfig, styles: Mapping[str, str] | None = None) -> None:
        peft = _peft()
        layers, named = _targets(lm, given.targets)
        alpha = given.alpha or 2.0 * given.rank
        self.layers, self.rank = layers, given.rank
        self.scale = scale_of(given.rank, alpha, given.use_rslora)
        self.config: Any = peft.LoraConfig(
            r=given.rank,
            lora_alpha=int(alpha) if alpha.is_integer() else alpha,
            target_modules=named,
            use_rslora=given.use_rslora,
            task_type="CAUSAL_LM",
        )
        peft.inject_adapter_in_model(self.config, lm, low_cpu_mem_usage=True)
        for module in lm.modules():
            kind: Any = type(module)
            if kind is peft.tuners.lora.Linear:
                module.__class__ = _merged_class(kind)
        trained = [(name, p) for name, p in lm.named_parameters() if p.requires_grad]
        self.specs = [TensorSpec(name, tuple(p.shape), _tp_dim(name, styles or {})) for name, p in trained]
        # Anything else would not be merged.
        assert {spec.name for spec in self.specs} == {layer + end for layer in layers for end in (_A, _B)}

    def initial_weights(self, seed: int) -> Read:
        """Returns a reader of initial weights: B is 0, A is drawn like PEFT's, but seeded by its name."""
        shapes = {spec.name: spec.shape for spec in self.specs}

        def read(name: str, part: tuple[slice, ...]) -> Tensor:
            whole = torch.zeros(shapes[name])
            if name.endswith(_A):
                digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
                noise = torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)
                nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=noise)
            return whole[part]

        return read

    def tp_styles(self, styles: Mapping[str, str]) -> dict[str, str]:
        """Returns how tensor parallelism cuts the modules that are in the adapted layers: the weight as before, with it
        the rows of B, or the columns of A. The other matrix is whole, and so is its gradient."""
        result = dict(styles)
        for layer in self.layers:
            if style := result.pop(layer, None):
                result |= {f"{layer}.base_layer": style, f"{layer}.{_CUT[style]}.default": style}
        return result

    def gather_a(self, parts: Mapping[str, Tensor], process_group: dist.ProcessGroup) -> dict[str, Tensor]:
        """Returns this rank's shards, but every A whole, gathered from all ranks in one exchange."""
        names, ranks = [name for name in parts if name.endswith(_A)], dist.get_world_size(process_group)
        rows = -(-self.rank // ranks)  # per rank; the last ones may have fewer
        mine = [nn.functional.pad(parts[name], (0, 0, 0, rows - len(parts[name]))).flatten() for name in names]
        gathered = mine[0].new_empty(ranks, sum(map(len, mine)))
        all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # in older versions
        all_gather(gathered.view(-1), torch.cat(mine), group=process_group)
        pieces = zip(names, gathered.split([len(a) for a in mine], 1), strict=True)
        return {**parts, **{name: a.reshape(rows * ranks, -1)[: self.rank] for name, a in pieces}}

    def scaled(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the matrices with B scaled, so that B @ A is the update of a weight."""
        return {name: part * self.scale if name.endswith(_B) else part for name, part in parts.items()}

    def save(self, folder: Path, base: str | None) -> None:
        """Writes PEFT's config, which names the base model."""
        config = copy(self.config)
        config.base_model_name_or_path, config.inference_mode = base, True
        config.target_modules = sorted(config.target_modules)
        config.save_pretrained(folder)


class MergedWeights(Mapping[str, Tensor]):
    """Shards of weights with the adapter merged, each computed on lookup."""

    def __init__(self, base: Mapping[str, Tensor], pairs: Pairs, scale: float) -> None:
        self.base, self.pairs, self.scale = base, pairs, scale

    def __getitem__(self, name: str) -> Tensor:
        return merge(self.base[name], self.pairs.get(name), self.scale)

    def __iter__(self) -> Iterator[str]:
        return iter(self.base)

    def __len__(self) -> int:
        return len(self.base)


def scale_of(rank: int, alpha: float, rank_stabilised: bool) -> float:
    """Returns by what B @ A is multiplied."""
    return alpha / (math.sqrt(rank) if rank_stabilised else rank)


def merge(weight: Tensor, pair: tuple[Tensor, Tensor] | None, scale: float) -> Tensor:
    """Returns weight + scale · B @ A in float32; weight and B are the same rows, A is whole."""
    if pair is None:
        return weight
    if kernels_for(weight, *pair):  # whose rows do not depend on how many there are
        return multiply(*pair).mul_(scale).add_(weight)
    return torch.addmm(weight.float(), *pair, alpha=scale)


@cache
def _merged_class(theirs: Any) -> Any:
    return type("MergedLinear", (_MergedLinear, theirs), {})


class _MergedLinear(nn.Module):
    """PEFT's layer, which where there are kernels multiplies by what a rollout engine does: the merged weight."""

    base_layer: nn.Linear
    lora_A: Any  # noqa: N815
    lora_B: Any  # noqa: N815
    scaling: Mapping[str, float]
    disable_adapters: bool

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        base, pair = self.base_layer, (self.lora_B["default"].weight, self.lora_A["default"].weight)
        if self.disable_adapters or not kernels_for(x, base.weight, *pair):
            return super().forward(x, *args, **kwargs)  # type: ignore[no-any-return]
        return _Merged.apply(x, base.weight, base.bias, *pair, self.scaling["default"])  # type: ignore[no-any-return, no-untyped-call]


class _Merged(torch.autograd.Function):
    """Its gradient has no product of the weight's size: the merged weight is made twice, which costs less."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, b: Tensor, a: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x, weight, b, a)
        ctx.scale = scale
        out = multiply(x.flatten(0, -2), merge(weight, (b, a), scale).T)
        return (out if bias is None else out.add_(bias)).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, b, a = ctx.saved_tensors
        rows, slopes = x.flatten(0, -2), d.flatten(0, -2)
        d_x = multiply(slopes, merge(weight, (b, a), ctx.scale)).view(x.shape) if ctx.needs_input_grad[0] else None
        d_b = multiply(slopes.T, multiply(rows, a.T)).mul_(ctx.scale)
        d_a = multiply(multiply(slopes, b).T, rows).mul_(ctx.scale)
        return d_x, None, None, d_b, d_a, None


def adapter_pairs(adapter: Mapping[str, Tensor]) -> Pairs:
    """Returns B and A by the name of the weight that they adapt."""
    layers = [name.removesuffix(_B) for name in adapter if name.endswith(_B)]
    return {layer + _WEIGHT: (adapter[layer + _B], adapter[layer + _A]) for layer in layers}


def base_name(name: str) -> str:
    """Returns the name of a parameter in a model without an adapter."""
    return name.replace(".base_layer.", ".")


def peft_name(name: str) -> str:
    """Returns the name of an adapter's matrix in PEFT's files."""
    return "base_model.model." + name.replace(".default.", ".")


def _tp_dim(name: str, styles: Mapping[str, str]) -> int | None:
    """Returns the dimension of a matrix that tensor parallelism cuts: rows of B or columns of A."""
    layer, _, _ = name.partition(".lora_")
    uncut = {"colwise": _A, "rowwise": _B}.get(styles.get(layer, ""))
    return None if uncut is None or name.endswith(uncut) else int(uncut == _B)


def _targets(lm: PreTrainedModel, given: list[str]) -> tuple[set[str], list[str]]:
    """Returns the layers to adapt, and the suffixes by which PEFT finds them: layers of the language model."""
    adaptable = set(lm.get_decoder().modules())
    linear = {name for name, m in lm.named_modules() if isinstance(m, nn.Linear) and m in adaptable}
    leaves = {name.rpartition(".")[2] for name in linear}
    if not linear:
        raise ConfigError(f"train.lora: a {lm.config.model_type} model has no nn.Linear layers; leave it out")
    named = sorted(leaves) if given == [ALL_LINEAR] else given
    for target in named:
        if not any(_is(name, target) for name in linear):
            known = {*leaves, ALL_LINEAR} if len(given) == 1 else leaves
            raise ConfigError(
                f"train.lora.targets: '{target}' is no linear layer in the model's blocks{suggest(target, known)}"
            )
    matched = {name for name, _ in lm.named_modules() if any(_is(name, target) for target in named)}
    return matched & linear, named if matched <= linear else sorted(matched & linear)


def _is(name: str, target: str) -> bool:
    return name == target or name.endswith("." + target)


def _peft() -> ModuleType:
    try:
        import peft
    except ImportError as e:
        raise ConfigError(f"train.lora: PEFT is not installed ({e}); {how_to_install('lora')}") from None
    return peft
