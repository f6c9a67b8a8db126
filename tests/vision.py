"""Small vision-language models, pictures, and prompts with pictures."""

import io
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from distflow.config.schema import WITH_VISION, ModelConfig, VisionConfig
from distflow.model.images import Images
from distflow.model.source import Source, open_model
from distflow.model.text import Text
from tiny import randomize_weights

ARCHITECTURES = WITH_VISION
TOWER = VisionConfig(hidden=32, layers=2, heads=4, patch=4, size=32)
QUESTION = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}]
TWO = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": " and "}, {"type": "image"}]}]


def png(size: tuple[int, int] = (24, 16), seed: int = 0) -> bytes:
    """Returns a picture of coloured noise."""
    noise = torch.Generator().manual_seed(seed)
    pixels = torch.randint(256, (size[1], size[0], 3), generator=noise, dtype=torch.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels.numpy()).save(out, "PNG")
    return out.getvalue()


@dataclass(frozen=True)
class Model:
    source: Source
    eager: Any  # transformers' own
    ours: Any  # with our attention, and the same weights
    images: Images
    text: Text

    def alone(self, tokens: Sequence[int], pictures: Sequence[str]) -> Tensor:
        """Returns the logits [tokens, vocabulary] of one sequence, by transformers alone."""
        given = torch.tensor([list(tokens)])
        kinds = (given == self.images.token).int()
        with torch.no_grad():
            out = self.eager(input_ids=given, **self.inputs(pictures), mm_token_type_ids=kinds, use_cache=False)
        logits: Tensor = out.logits[0]
        return logits

    def inputs(self, pictures: Sequence[str]) -> Mapping[str, Tensor]:
        """What the processor makes of all pictures of a prompt at once."""
        if not pictures:
            return {}
        made = self.images.processor.image_processor([[self.images.open(p) for p in pictures]], return_tensors="pt")
        return {k: v for k, v in made.items() if isinstance(v, Tensor)}


def small(arch: str) -> ModelConfig:
    return ModelConfig(arch=arch, hidden=64, layers=2, heads=2, kv_heads=1, ffn=48, vision=TOWER)


@cache
def model(arch: str) -> Model:
    source = open_model(small(arch), lambda: iter(["What?"]), Path(), 0)
    config, build = source.config, source.model_class.from_config
    eager = build(deepcopy(config), dtype=torch.float32, attn_implementation="eager").eval()
    randomize_weights(eager)
    ours = build(deepcopy(config), dtype=torch.float32, attn_implementation=source.attention)
    ours.load_state_dict(eager.state_dict())
    rows = {"train": lambda number: {"images": [png((24, 16), number), png((16, 32), number + 100)]}}
    images = Images(source.processor, rows)
    text = Text(source, 1000, images=images)
    return Model(source, eager.requires_grad_(False), ours.eval().requires_grad_(False), images, text)


def picture(number: int, index: int = 0) -> str:
    return f"row:train:{number}:{index}"
