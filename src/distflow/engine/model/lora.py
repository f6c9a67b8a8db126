"""An adapter (LoRA): two matrices of low rank, B and A, beside each of some linear layers. W + scale · B @ A is trained
by them alone. PEFT puts them there, so that names and files are PEFT's; shards and rollouts are seen to here."""

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
from distflow.data.transport import all_gather
from distflow.engine.model.source import Read
from distflow.engine.weights import Spec
from distflow.errors import ConfigError, suggest

_A, _B, _WEIGHT = ".lora_A.default.weight", ".lora_B.default.weight", ".weight"
Pairs = Mapping[str, tuple[Tensor, Tensor]]  # weight → B and A


class Adapter:
    """Puts an adapter into `lm`, which has no memory yet, and freezes the rest."""

    def __init__(self, lm: PreTrainedModel, given: LoraConfig) -> None:
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
        self.specs = [Spec(name, tuple(p.shape)) for name, p in lm.named_parameters() if p.requires_grad]
        # What is beside anything else would not be merged.
        assert {spec.name for spec in self.specs} == {layer + end for layer in layers for end in (_A, _B)}

    def at_first(self, seed: int) -> Read:
        """B is 0, and A drawn as PEFT draws it, but from its name: the same in any layout."""
        shapes = {spec.name: spec.shape for spec in self.specs}

        def read(name: str, part: tuple[slice, ...]) -> Tensor:
            whole = torch.zeros(shapes[name])
            if name.endswith(_A):
                digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
                noise = torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)
                nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=noise)
            return whole[part]

        return read

    def with_whole_a(self, parts: Mapping[str, Tensor], group: dist.ProcessGroup) -> dict[str, Tensor]:
        """This rank's parts, but every A whole, from the rows of all ranks of `group`; in one exchange."""
        names, ranks = [name for name in parts if name.endswith(_A)], dist.get_world_size(group)
        rows = -(-self.rank // ranks)  # of the first ranks; the last may have fewer
        mine = [nn.functional.pad(parts[name], (0, 0, 0, rows - len(parts[name]))).flatten() for name in names]
        everybody = mine[0].new_empty(ranks, sum(map(len, mine)))
        all_gather(everybody.view(-1), torch.cat(mine), group=group)
        pieces = zip(names, everybody.split([len(a) for a in mine], 1), strict=True)
        return {**parts, **{name: a.reshape(rows * ranks, -1)[: self.rank] for name, a in pieces}}

    def save(self, folder: Path, base: str | None) -> None:
        """PEFT's config of it, which says what model it belongs to."""
        config = copy(self.config)
        config.base_model_name_or_path, config.inference_mode = base, True
        config.target_modules = sorted(config.target_modules)
        config.save_pretrained(folder)


class Merged(Mapping[str, Tensor]):
    """Parts of weights with the adapter in them; each is made when it is asked for."""

    def __init__(self, base: Mapping[str, Tensor], pairs: Pairs, scale: float) -> None:
        self.base, self.pairs, self.scale = base, pairs, scale

    def __getitem__(self, name: str) -> Tensor:
        return merge(self.base[name], self.pairs.get(name), self.scale)

    def __iter__(self) -> Iterator[str]:
        return iter(self.base)

    def __len__(self) -> int:
        return len(self.base)


def merge(weight: Tensor, pair: tuple[Tensor, Tensor] | None, scale: float) -> Tensor:
    """In float32, as all of them are. Of a weight and B, the same rows; A is whole."""
    return weight if pair is None else torch.addmm(weight, *pair, alpha=scale)


def pairs(adapter: Mapping[str, Tensor]) -> Pairs:
    """By the weight that they are beside."""
    layers = [name.removesuffix(_B) for name in adapter if name.endswith(_B)]
    return {layer + _WEIGHT: (adapter[layer + _B], adapter[layer + _A]) for layer in layers}


def plain(name: str) -> str:
    """What a parameter is called where there is no adapter."""
    return name.replace(".base_layer.", ".")


def in_file(name: str) -> str:
    """What a matrix of the adapter is called in PEFT's files."""
    return "base_model.model." + name.replace(".default.", ".")


def _targets(lm: PreTrainedModel, given: list[str]) -> tuple[set[str], list[str]]:
    """Layers, and what PEFT finds them by: the end of their name."""
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
    found = {name for name, _ in lm.named_modules() if any(_is(name, target) for target in named)}
    return found & linear, named if found <= linear else sorted(found & linear)


def _is(name: str, target: str) -> bool:
    return name == target or name.endswith("." + target)


def _peft() -> ModuleType:
    try:
        import peft
    except ImportError as e:
        raise ConfigError(f"train.lora: PEFT is not installed ({e}); pip install 'distflow-rl[lora]'") from None
    return peft
