"""The processor of a vision-language model: its image processor, which needs Pillow only, beside its tokenizer."""

import json
import shutil
from inspect import signature
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING, AutoProcessor  # noqa: F401  AutoProcessor fills it

from distflow.errors import ConfigError, short_reason

# Families whose language model sees the tokens of an image in both directions.
BOTH_WAYS = ("deepseek_ocr2", "gemma3", "gemma4", "gemma4_unified", "git", "paligemma", "unlimited_ocr")
_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
_TEMPLATES = ("chat_template.json", "chat_template.jinja")
_PARTS = ("image_processor", "video_processor", "tokenizer", "chat_template")


def reads_images(config: PreTrainedConfig) -> bool:
    """Returns whether a model of this config has a vision tower beside its language model."""
    return "vision_config" in config.sub_configs and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING


def make_processor(config: PreTrainedConfig, tokenizer: Tokenizer, image_processor: Any, **options: Any) -> Any:
    """Makes the processor of a model, without one for videos: that would need torchvision."""
    kind: Any = PROCESSOR_MAPPING[type(config)]

    def any_part(self: Any, name: str, part: Any) -> None:
        """Accepts that there is no video processor."""

    kind = type(kind.__name__, (kind,), {"check_argument_for_proper_class": any_part})
    names = signature(kind.__init__).parameters
    options = {k: v for k, v in options.items() if k in names and k not in _PARTS}
    if "video_processor" in names:
        options["video_processor"] = None
    try:
        processor = kind(image_processor=image_processor, tokenizer=tokenizer, **options)
    except ImportError as e:
        raise ConfigError(f"model: the processor of {config.model_type} models lacks a package: {e}") from None
    if not hasattr(processor, "replace_image_token"):
        raise ConfigError(
            f"model: the processor of {config.model_type} models does not say which tokens stand for an image; use a"
            " newer version of transformers, or a model of another family"
        )
    return processor


def open_processor(folder: Path, config: PreTrainedConfig, tokenizer: Tokenizer) -> Any:
    """Opens the processor in the folder of a model; the tokenizer gets its chat template, if it has none."""
    from transformers import AutoImageProcessor

    try:
        image_processor = AutoImageProcessor.from_pretrained(folder, backend="pil", local_files_only=True)
        kind: Any = PROCESSOR_MAPPING[type(config)]
        given, _ = kind.get_processor_dict(folder, local_files_only=True)
    except (OSError, ValueError, ImportError) as e:
        raise ConfigError(f"model: the image processor in {folder} cannot be loaded: {short_reason(e)}") from None
    if not tokenizer.chat_template:
        tokenizer.chat_template = given.get("chat_template")
    return make_processor(config, tokenizer, image_processor, **given)


def save_processor(processor: Any, source: Path | None, folder: Path) -> None:
    """Writes the files of a processor beside a model, or copies the ones that it was read from."""
    files = [source / name for name in (*_FILES, *_TEMPLATES)] if source else []
    for file in files:
        if file.is_file():
            shutil.copy(file, folder)
    if source is None:
        processor.image_processor.save_pretrained(folder)
        names = signature(type(processor).__init__).parameters
        plain = {k: v for k in names if isinstance(v := getattr(processor, k, None), int | str) and k not in _PARTS}
        text = json.dumps({"processor_class": type(processor).__name__, **plain}, indent=2)
        (folder / "processor_config.json").write_text(text)
