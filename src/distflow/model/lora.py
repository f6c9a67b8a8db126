"""LoRA: low-rank matrices B and A of linear layers, so that W + scale · B @ A is trained through them alone.

PEFT injects them, so that names and files are PEFT's; sharding and merging for the rollout are done here.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping
from copy import copy
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from distflow.config.schema import ALL_LINEAR, LoraConfig
from distflow.errors import ConfigError, suggest
from distflow.model.source import Read
from distflow.util.extras import how_to_install
from distflow.weights.shards import TensorSpec

_A, _B, _WEIGHT = ".lora_A.default.weight", ".lora_B.default.weight", ".weight"
Pairs = Mapping[str, tuple[Tensor, Tensor]]  # weight → B and A


class LoraAdapter:
    """Injects an adapter into `lm`, which is on the meta device, and freezes the rest.

    `styles`: how tensor parallelism cuts the layers, for an engine that does not merge the adapter.
    """

    def __init__(self, lm: PreTrainedModel, given: LoraConfig, styles: Mapping[str, str] | None = None) -> None:
        peft = _peft()
        layers, named = _targets(lm, given.targets)
        alpha = given.alpha or 2.0 * given.rank
        self.rank, self.scale = given.rank, alpha / given.rank
        self.config: Any = peft.LoraConfig(
            r=given.rank,
            lora_alpha=int(alpha) if alpha.is_integer() else alpha,
            target_modules=named,
            task_type="CAUSAL_LM",
        )
        peft.inject_adapter_in_model(self.config, lm, low_cpu_mem_usage=True)
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


def merge(weight: Tensor, pair: tuple[Tensor, Tensor] | None, scale: float) -> Tensor:
    """Returns weight + scale · B @ A in float32; weight and B are the same rows, A is whole."""
    return weight if pair is None else torch.addmm(weight, *pair, alpha=scale)


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
    """Returns the layers to adapt, and the suffixes by which PEFT finds them."""
    head = lm.get_output_embeddings()
    linear = {name for name, m in lm.named_modules() if isinstance(m, nn.Linear) and m is not head}
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
