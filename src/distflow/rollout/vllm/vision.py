"""Vision-language models in vLLM: it gets images as the trainer has processed them, and processes none itself.

So it needs no files of a processor, nor torchvision, and its vision tower sees the very same pixels.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from hashlib import sha256
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BatchFeature

from distflow.errors import ConfigError
from distflow.model.images import Images
from distflow.rollout.engine import Request

ARCHITECTURES = (
    "Idefics3ForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
)  # that are tested
_WITH_TORCHVISION = "transformers.models.qwen2_vl.image_processing_qwen2_vl"
_WITH_PILLOW = "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl"  # has the one function that vLLM imports


def start_arguments(architecture: str, tp: int) -> dict[str, Any]:
    """Prepares vLLM's class of a vision-language model; returns the arguments that it starts with."""
    model = _model_class(architecture)
    if tp > 1 and not model.supports_encoder_tp_data:
        raise ConfigError(
            f"placement: with tp {tp} vLLM would divide the vision tower of a {architecture}, which the weight sync"
            " keeps whole; generate with tp 1, or use `engine: builtin`"
        )
    return {"mm_processor_cache_gb": 0, "skip_mm_profiling": True, "mm_encoder_tp_mode": "data"}


class Vision:
    """Gives the images of requests to vLLM's engine, whose model is `model`."""

    def __init__(self, images: Images, engine: Any, model: Any) -> None:
        self.images, self.engine = images, engine
        embed = model.embed_input_ids

        def embed_as_read(tokens: Tensor, *found: Any, is_multimodal: Tensor, **given: Any) -> Tensor:
            """No token that was sampled stands for an image."""
            read = torch.where(is_multimodal.to(tokens.device), tokens, images.as_read(tokens))
            embedded: Tensor = embed(read, *found, is_multimodal=is_multimodal, **given)
            return embedded

        model.embed_input_ids = embed_as_read

    def prompt(self, request: Request) -> Mapping[str, Any]:
        """Returns the prompt of a request with its images, whose tensors all requests share."""
        from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

        tokens = list(request.prompt)
        places = self.images.places(tokens, request.images)
        of_image = torch.tensor(tokens) == self.images.token
        return {
            "type": "multimodal",
            "prompt_token_ids": tokens,
            "mm_kwargs": MultiModalKwargsItems({"image": [self._arguments(p.reference) for p in places]}),
            "mm_hashes": {"image": [sha256(p.reference.encode()).hexdigest() for p in places]},
            "mm_placeholders": {
                "image": [PlaceholderRange(p.start, p.end - p.start, of_image[p.start : p.end]) for p in places]
            },
        }

    def forget(self) -> None:
        """Drops what the vision tower has made of images with the weights before."""
        self.engine.engine_core.reset_encoder_cache()

    def _arguments(self, reference: str) -> Any:
        from vllm.multimodal.inputs import MultiModalKwargsItems

        tensors = dict(self.images.processed(reference).tensors)
        if tensors["pixel_values"].ndim == 5:  # [prompts, parts of the image, …], with one prompt
            tensors = {name: t[0] for name, t in tensors.items()}
            tensors["num_patches"] = torch.tensor([len(tensors["pixel_values"])])
        made, processor = BatchFeature(tensors), self.engine.renderer.mm_processor
        [arguments] = MultiModalKwargsItems.from_hf_inputs(made, processor._get_mm_fields_config(made, {}))["image"]
        return arguments


def view_name(model: nn.Module, name: str) -> str:
    """Returns how vLLM's model calls a parameter of transformers."""
    prefixes: Mapping[str, str] = getattr(getattr(model, "hf_to_vllm_mapper", None), "orig_to_new_prefix", {})
    return next((new + name.removeprefix(old) for old, new in prefixes.items() if name.startswith(old)), name)


@contextmanager
def _pillow_instead() -> Iterator[None]:
    sys.modules[_WITH_TORCHVISION] = import_module(_WITH_PILLOW)
    try:
        yield
    finally:
        del sys.modules[_WITH_TORCHVISION]


def _model_class(architecture: str) -> Any:
    """Returns vLLM's class of a model, registered so that it neither opens a processor nor makes images to try."""
    from vllm.model_executor.models.registry import ModelRegistry

    with nullcontext() if find_spec("torchvision") else _pillow_instead():
        model = ModelRegistry.models[architecture].load_model_cls()
    ModelRegistry.register_model(architecture, model)  # else it is imported once more, in a process to inspect it
    factories = model._processor_factory
    # Images only, as large as a sequence, by a class that needs no tokenizer.
    limits = {
        "get_supported_mm_limits": lambda self: {"image": None},
        "get_mm_max_tokens_per_item": lambda self, seq_len, mm_counts: dict.fromkeys(mm_counts, seq_len),
    }
    model._processor_factory = replace(
        factories,
        info=type("Info", (factories.info,), limits),
        processor=type("Processor", (factories.processor,), {"requires_tokenizer": False}),
    )
    return model
