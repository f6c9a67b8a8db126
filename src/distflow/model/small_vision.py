"""Small vision-language models with random weights: their configs, image tokens and processors."""

from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers import PreTrainedTokenizerBase as Tokenizer

from distflow.config.schema import VisionConfig
from distflow.errors import ConfigError
from distflow.model.processor import make_processor

_MERGE = 2  # patches along each side that become one token
_QWEN = {"image": "<|image_pad|>", "video": "<|video_pad|>", "start": "<|vision_start|>", "end": "<|vision_end|>"}
_IDEFICS = {
    "image": "<image>",
    "around": "<fake_token_around_image>",
    "whole": "<global-img>",
    "end": "<end_of_utterance>",
}
_TEMPLATE = (
    "{% for m in messages %}{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for p in m['content'] %}"
    "{% if p['type'] == 'image' %}IMAGE{% else %}{{ p['text'] }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)


def add_image_tokens(tokenizer: Tokenizer, arch: str) -> None:
    """Adds the special tokens of images, and a chat template that writes them."""
    names = _IDEFICS if arch == "idefics3" else _QWEN
    tokenizer.add_special_tokens({"additional_special_tokens": list(names.values())})
    image = names["image"] if arch == "idefics3" else names["start"] + names["image"] + names["end"]
    tokenizer.chat_template = _TEMPLATE.replace("IMAGE", image)


def small_config(arch: str, text: Mapping[str, Any], given: VisionConfig, tokenizer: Tokenizer) -> PreTrainedConfig:
    """Returns the config of a small model whose language part has the config `text`."""
    vision: dict[str, Any] = {"hidden_size": given.hidden, "intermediate_size": 4 * given.hidden}
    vision["patch_size"] = given.patch
    kind: Any = CONFIG_MAPPING[arch]
    ids = tokenizer.get_vocab()
    tied: dict[str, Any] = {"tie_word_embeddings": True}
    if arch == "idefics3":
        vision |= {"num_hidden_layers": given.layers, "num_attention_heads": given.heads, "image_size": given.size}
        more: dict[str, Any] = {"image_token_id": ids[_IDEFICS["image"]], "scale_factor": _MERGE}
        text = {**text, "model_type": "llama"}
        return kind(text_config=text, vision_config=vision, **more, **tied)  # type: ignore[no-any-return]
    half = text["head_dim"] // 2
    if half < 4:
        raise ConfigError(f"model: each head of a {arch} has 8 numbers or more; raise hidden, or lower heads")
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [half - 2 * (half * 3 // 8), *[half * 3 // 8] * 2],
    }
    vision |= {"depth": given.layers, "num_heads": given.heads, "out_hidden_size": text["hidden_size"]}
    if arch == "qwen2_5_vl":
        vision |= {"fullatt_block_indexes": [given.layers - 1], "window_size": 4 * _MERGE * given.patch}
    else:
        rope["mrope_interleaved"] = True  # as in Qwen's own configs: transformers takes it for granted, vLLM does not
        side = given.size // given.patch
        vision |= {"deepstack_visual_indexes": [0], "num_position_embeddings": side * side}
    names = {
        "image_token_id": "image",
        "video_token_id": "video",
        "vision_start_token_id": "start",
        "vision_end_token_id": "end",
    }
    more = {key: ids[_QWEN[name]] for key, name in names.items()}
    text = {**text, "rope_parameters": rope}
    return kind(text_config=text, vision_config=vision, **more, **tied)  # type: ignore[no-any-return]


def small_processor(arch: str, config: PreTrainedConfig, given: VisionConfig, tokenizer: Tokenizer) -> Any:
    """Returns the processor of a small model: an image has at most `given.size` pixels along each side."""
    if arch == "idefics3":
        from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

        side = {"longest_edge": given.size}
        images: Any = Idefics3ImageProcessorPil(size=side, max_image_size=side, do_image_splitting=False)
        tokens = (given.size // given.patch // _MERGE) ** 2
        return make_processor(config, tokenizer, images, image_seq_len=tokens)
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    unit = _MERGE * given.patch
    size = {"shortest_edge": unit**2, "longest_edge": given.size**2}
    images = Qwen2VLImageProcessorPil(patch_size=given.patch, merge_size=_MERGE, size=size)
    return make_processor(config, tokenizer, images)
