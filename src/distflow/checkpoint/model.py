"""The model of a role in a checkpoint: found, verified, and read in parts, with an adapter merged."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig
from transformers import PreTrainedTokenizerBase as Tokenizer

from distflow.checkpoint.store import (
    TENSORS,
    foreign_file,
    format_problem,
    load_full_tensors,
    names_of_checkpoints,
    part_reader,
)
from distflow.errors import ConfigError, suggest
from distflow.model.description import ADAPTER, BASE, HEAD, MODEL
from distflow.model.lora import adapter_pairs, merge, scale_of
from distflow.model.processor import open_processor, reads_images
from distflow.model.source import Head, Read, Source, find_folder
from distflow.run_folder import AUTO, NEWEST
from distflow.weights.state import WEIGHTS


def find_checkpoint(run_folder: Path, given: str) -> Path:
    """Returns a checkpoint, not yet verified: `given` itself, or the newest of a run, by default of `run_folder`."""
    folder = run_folder if given in (AUTO, NEWEST) else Path(given).expanduser()
    names = names_of_checkpoints(folder)
    if not names:
        raise ConfigError(f"{folder}: there is no checkpoint here; name a run's folder, or one of its checkpoints")
    path = folder / names[0]
    if problem := foreign_file(path) or format_problem(path):
        raise ConfigError(f"{problem}; name another checkpoint")
    return path


def find_role(path: Path, role: str | None) -> Path:
    """Returns the folder of a role in a checkpoint: by default the actor's, or that of the only model."""
    models = sorted(p.parent.name for p in path.glob(f"*/{MODEL}"))
    if role is None and models:
        return path / ("actor" if "actor" in models else models[0])
    if role not in models:
        raise ConfigError(f"{path}: has no role '{role or 'actor'}' with a model{suggest(role or 'actor', models)}")
    return path / role


def open_checkpoint(folder: Path, base: str | None = None, prefix: str = WEIGHTS) -> Source:
    """Opens the model in the folder of a role. An adapter is merged into the model that it was trained on, which is
    read from where it was then, or from `base`. `prefix`: of the tensors to read."""
    config, tokenizer = _description(folder / MODEL)
    head: Head = "lm" if (folder / HEAD).read_text() == "lm" else "value"
    processor = open_processor(folder / MODEL, config, tokenizer) if reads_images(config) else None
    weights = part_reader(folder, prefix)
    source = Source(str(folder), config, tokenizer, head=head, weights=weights, processor=processor)
    if not (folder / ADAPTER).is_dir():
        return source
    return replace(source, weights=_merged(folder, source, base, prefix))


def _description(folder: Path) -> tuple[PreTrainedConfig, Tokenizer]:
    """Returns config and tokenizer of a model; refuses code that comes with them, without a question to the user."""
    only_data: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
    try:
        return AutoConfig.from_pretrained(folder, **only_data), AutoTokenizer.from_pretrained(folder, **only_data)
    except ValueError as e:
        if "trust_remote_code" not in str(e):
            raise
        raise ConfigError(
            f"{folder}: the model comes with code of its own, which is never run from a checkpoint; load the model"
            f" yourself, and fill it with what is in {folder.parent / TENSORS}"
        ) from None


def _merged(folder: Path, source: Source, base: str | None, prefix: str) -> Read:
    config = json.loads((folder / ADAPTER / "adapter_config.json").read_text())
    pairs = adapter_pairs(load_full_tensors(folder, prefix))
    scale = scale_of(config["r"], config["lora_alpha"], config.get("use_rslora", False))
    shapes = {name: p.shape for name, p in source.skeleton().named_parameters()}
    read = _base_model(folder, source, base).reader(shapes)

    @torch.no_grad()
    def read_merged(name: str, part: tuple[slice, ...]) -> Tensor:
        pair = pairs.get(name)
        if pair is None:
            return read(name, part)
        rows, columns = part
        return merge(read(name, part).float(), (pair[0][rows], pair[1][:, columns]), scale)

    return read_merged


def _base_model(folder: Path, source: Source, location: str | None) -> Source:
    """Opens the model that an adapter was trained on; one with random weights is made again from its seed."""
    base = json.loads((folder / ADAPTER / BASE).read_text())
    base_dir = Path(base["folder"]) if base["folder"] else None
    if location is not None:
        base_dir = find_folder(location, Path())
    elif base_dir and not base_dir.is_dir():
        raise ConfigError(
            f"{folder}: its adapter belongs to the model '{base['name']}', which is no longer in {base_dir};"
            " say where it is: --base NAME-OR-DIRECTORY"
        )
    return Source(base["name"], source.config, source.tokenizer, base_dir, base["seed"])
