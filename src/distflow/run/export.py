"""The weights of a run for everybody else: a Hugging Face directory, or PEFT's files of an adapter."""

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
from distflow.run.checkpoint import damage, load_whole, place_of, steps_there


def export(run: Path, out: Path, step: int | None = None, role: str | None = None, base: str | None = None) -> Path:
    """The weights of a run as a directory that `from_pretrained` loads; the newest, or those of a step.

    Of the actor, if there is one and no other `role` is named. An adapter is merged into the model it was trained on,
    which is where it was then, or at `base`.
    """
    return export_place(_place(run, out, step, role), out, base)


def export_place(place: Path, out: Path, base: str | None = None) -> Path:
    """The same, of one role in a checkpoint."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
    from transformers.utils import logging

    config, tokenizer = AutoConfig.from_pretrained(place / "model"), AutoTokenizer.from_pretrained(place / "model")
    made = AutoModelForCausalLM if (place / HEAD).read_text() == "lm" else AutoModelForSequenceClassification
    with torch.device("meta"):
        model = made.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    weights = _weights(place)
    if (place / ADAPTER).is_dir():
        shapes = {name: p.shape for name, p in model.named_parameters()}
        weights = _merged(place, weights, shapes, _base(place, config, tokenizer, base))
    logging.disable_progress_bar()
    model.save_pretrained(out, state_dict=weights)
    tokenizer.save_pretrained(out)
    if (place / "model" / "generation_config.json").exists():
        shutil.copy(place / "model" / "generation_config.json", out)
    return out


@torch.no_grad()
def _merged(place: Path, adapter: Mapping[str, Tensor], shapes: Mapping[str, Any], base: Source) -> dict[str, Tensor]:
    said = json.loads((place / ADAPTER / "adapter_config.json").read_text())
    beside, scale, read = adapter_pairs(adapter), said["lora_alpha"] / said["r"], base.reader(list(shapes))
    parts = {name: tuple(map(slice, shape)) for name, shape in shapes.items()}
    return {name: merge(read(name, part).float(), beside.get(name), scale) for name, part in parts.items()}


def export_adapter(run: Path, out: Path, step: int | None = None, role: str | None = None) -> Path:
    """The adapter alone, as PEFT writes it."""
    place = _place(run, out, step, role)
    if not (place / ADAPTER).is_dir():
        raise ConfigError(f"{run}: '{place.name}' was trained without an adapter; export it without --adapter")
    out.mkdir(parents=True, exist_ok=True)
    save_file(
        {peft_name(n): w for n, w in _weights(place).items()}, out / "adapter_model.safetensors", {"format": "pt"}
    )
    shutil.copy(place / ADAPTER / "adapter_config.json", out)
    return out


def _place(run: Path, out: Path, step: int | None, role: str | None) -> Path:
    """Where the weights of a role are; `out` can take them."""
    there = steps_there(run / "checkpoints")
    if not there:
        raise ConfigError(f"{run}: has no checkpoint in {run / 'checkpoints'}; a run writes one when it ends")
    if step is not None and step not in there:
        raise ConfigError(f"{run}: has no checkpoint of step {step}; there are: {', '.join(map(str, there[::-1]))}")
    place = place_of(run / "checkpoints", there[0] if step is None else step)
    if wrong := damage(place):
        raise ConfigError(f"{wrong}; export another step: {', '.join(map(str, there[1:])) or 'there is none'}")
    place /= _role(place, role)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as e:
        raise ConfigError(f"{out}: cannot be written: {getattr(e, 'strerror', e)}; choose another directory") from None
    if any(out.iterdir()):
        raise ConfigError(f"{out}: is not empty; choose another directory")
    return place


def _weights(place: Path) -> dict[str, Tensor]:
    """What the workers have written, put together."""
    return load_whole(place, WEIGHTS)


def _base(place: Path, config: Any, tokenizer: Any, given: str | None) -> Source:
    """The model that an adapter was trained on; one that was made on the spot is made again."""
    base = json.loads((place / ADAPTER / BASE).read_text())
    folder = Path(base["folder"]) if base["folder"] else None
    if given is not None:
        folder = find_folder(given, Path())
    elif folder and not folder.is_dir():
        raise ConfigError(
            f"{place}: its adapter belongs to the model '{base['name']}', which is no longer in {folder};"
            " say where it is: --base NAME-OR-DIRECTORY"
        )
    return Source(base["name"], config, tokenizer, folder, base["seed"])


def _role(place: Path, role: str | None) -> str:
    there = sorted(p.name for p in place.iterdir() if p.is_dir())
    if role is None:
        return "actor" if "actor" in there or not there else there[0]
    if role not in there:
        raise ConfigError(f"{place}: has no role '{role}'{suggest(role, there)}")
    return role
