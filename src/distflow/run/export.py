"""Exports the weights of a run: as a Hugging Face directory, or as PEFT's files of an adapter."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from distflow.engine.model.description import ADAPTER, BASE, HEAD
from distflow.engine.model.lora import adapter_pairs, merge, peft_name
from distflow.engine.model.source import Source, find_folder
from distflow.engine.role_state import WEIGHTS
from distflow.errors import ConfigError, suggest
from distflow.run.checkpoint import checkpoint_dir, format_problem, list_checkpoints, load_full_tensors, verify


def export(run: Path, out: Path, step: int | None = None, role: str | None = None, base: str | None = None) -> Path:
    """Writes the weights of a run as a directory that `from_pretrained` loads: the newest, or those of `step`.

    They are the actor's, if there is one and no other `role` is given. An adapter is merged into the model it was
    trained on, which is read from where it was then, or from `base`.
    """
    return export_role(_role_dir(run, out, step, role), out, base)


def export_role(folder: Path, out: Path, base: str | None = None) -> Path:
    """Exports one role from its folder in a checkpoint."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
    from transformers.utils import logging

    config, tokenizer = AutoConfig.from_pretrained(folder / "model"), AutoTokenizer.from_pretrained(folder / "model")
    auto_class = AutoModelForCausalLM if (folder / HEAD).read_text() == "lm" else AutoModelForSequenceClassification
    with torch.device("meta"):
        model = auto_class.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    weights = load_full_tensors(folder, WEIGHTS)
    if (folder / ADAPTER).is_dir():
        shapes = {name: p.shape for name, p in model.named_parameters()}
        weights = _merge(folder, weights, shapes, _base_model(folder, config, tokenizer, base))
    logging.disable_progress_bar()
    model.save_pretrained(out, state_dict=weights)
    tokenizer.save_pretrained(out)
    if (folder / "model" / "generation_config.json").exists():
        shutil.copy(folder / "model" / "generation_config.json", out)
    return out


@torch.no_grad()
def _merge(folder: Path, adapter: Mapping[str, Tensor], shapes: Mapping[str, Any], base: Source) -> dict[str, Tensor]:
    config = json.loads((folder / ADAPTER / "adapter_config.json").read_text())
    pairs, scale, read = adapter_pairs(adapter), config["lora_alpha"] / config["r"], base.reader(list(shapes))
    full = {name: tuple(map(slice, shape)) for name, shape in shapes.items()}
    return {name: merge(read(name, part).float(), pairs.get(name), scale) for name, part in full.items()}


def export_adapter(run: Path, out: Path, step: int | None = None, role: str | None = None) -> Path:
    """Writes the adapter alone, in PEFT's format."""
    folder = _role_dir(run, out, step, role)
    if not (folder / ADAPTER).is_dir():
        raise ConfigError(f"{run}: '{folder.name}' was trained without an adapter; export it without --adapter")
    weights = {peft_name(n): w for n, w in load_full_tensors(folder, WEIGHTS).items()}
    save_file(weights, out / "adapter_model.safetensors", {"format": "pt"})
    shutil.copy(folder / ADAPTER / "adapter_config.json", out)
    return out


def _role_dir(run: Path, out: Path, step: int | None, role: str | None) -> Path:
    """Returns the folder of a role in a complete checkpoint, and makes sure that `out` is an empty directory."""
    checkpoints = run / "checkpoints"
    steps = list_checkpoints(checkpoints)
    if not steps:
        raise ConfigError(f"{run}: has no checkpoint in {checkpoints}; a run writes one when it ends")
    if step is not None and step not in steps:
        raise ConfigError(f"{run}: has no checkpoint of step {step}; there are: {', '.join(map(str, steps[::-1]))}")
    step = steps[0] if step is None else step
    path = checkpoint_dir(checkpoints, step)
    if problem := format_problem(path):
        raise ConfigError(problem)
    if problem := verify(path):
        others = ", ".join(str(s) for s in steps if s != step)
        raise ConfigError(f"{problem}; export another step: {others or 'there is none'}")
    folder = path / _role(path, role)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as e:
        raise ConfigError(f"{out}: cannot be written: {getattr(e, 'strerror', e)}; choose another directory") from None
    if any(out.iterdir()):
        raise ConfigError(f"{out}: is not empty; choose another directory")
    return folder


def _base_model(folder: Path, config: Any, tokenizer: Any, location: str | None) -> Source:
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
    return Source(base["name"], config, tokenizer, base_dir, base["seed"])


def _role(path: Path, role: str | None) -> str:
    roles = sorted(p.name for p in path.iterdir() if p.is_dir())
    if role is None:
        return "actor" if "actor" in roles or not roles else roles[0]
    if role not in roles:
        raise ConfigError(f"{path}: has no role '{role}'{suggest(role, roles)}")
    return role
