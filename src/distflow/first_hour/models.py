"""Writes a model of given shapes with random weights, as a folder of the hub would be."""

import json
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from distflow.config.model_shape import ModelShape
from distflow.model.source import Source
from distflow.model.tokenizer import train_tokenizer
from distflow.rehearsal.check import config_from

_NOISE = 1 << 24  # numbers that are drawn; more would take minutes
_DEVIATION = 0.02
_FILE = 4 << 30  # bytes of a file, about


def answer(folder: str, shape: dict[str, Any]) -> dict[str, Any]:
    """Returns the number of parameters."""
    path, config = Path(folder), config_from(ModelShape(**shape))
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(iter(("some text",)), 0)
    config.eos_token_id, config.pad_token_id, config.bos_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id, None
    skeleton = Source("random", config, tokenizer).skeleton()
    noise = torch.randn(_NOISE, generator=torch.Generator().manual_seed(0)).mul_(_DEVIATION).bfloat16()
    part: dict[str, Tensor] = {}
    places: dict[str, str] = {}
    files = size = 0
    tensors = dict(skeleton.named_parameters())
    for i, (name, p) in enumerate(tensors.items()):
        count = prod(p.shape)
        one = torch.ones(count, dtype=noise.dtype) if p.dim() == 1 and name.endswith("norm.weight") else None
        part[name] = _tiled(noise, count, 7919 * i).view(p.shape) if one is None else one
        size += 2 * count
        if size >= _FILE or i == len(tensors) - 1:
            file = f"model-{files:05}.safetensors"
            save_file(part, path / file, {"format": "pt"})
            places |= dict.fromkeys(part, file)
            part, files, size = {}, files + 1, 0
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    config.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return {"parameters": sum(p.numel() for p in tensors.values())}


def _tiled(noise: Tensor, count: int, start: int) -> Tensor:
    """Returns so many of the numbers, again and again, from one of them on."""
    begun = noise.roll(-(start % len(noise)))
    return begun.repeat(-(-count // len(noise)))[:count].clone()
