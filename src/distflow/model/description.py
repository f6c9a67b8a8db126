"""The description of a model in a checkpoint, with which its weights can be used without the run."""

import json
import shutil
from pathlib import Path

from distflow.model.lora import LoraAdapter
from distflow.model.processor import save_processor
from distflow.model.source import Source

MODEL, HEAD = "model", "head"  # a folder with config and tokenizer; a file that names the head
ADAPTER, BASE = "adapter", "base.json"  # for a LoRA adapter: PEFT's config, and the address of the base model


def describe(folder: Path, source: Source, adapter: LoraAdapter | None = None) -> None:
    """Writes config, tokenizer and head of a model, and of an adapter its config and base model."""
    source.config.save_pretrained(folder / MODEL)
    source.tokenizer.save_pretrained(folder / MODEL)
    if source.processor:
        save_processor(source.processor, source.folder, folder / MODEL)
    if source.folder and (source.folder / "generation_config.json").exists():
        shutil.copy(source.folder / "generation_config.json", folder / MODEL)
    (folder / HEAD).write_text(source.head)
    if adapter:
        adapter.save(folder / ADAPTER, source.address)
        base_folder = str(source.folder.resolve()) if source.folder else None
        base = {"name": source.name, "folder": base_folder, "seed": source.seed}
        (folder / ADAPTER / BASE).write_text(json.dumps(base))
