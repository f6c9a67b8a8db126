"""A run's weights on disk: PyTorch's sharded format while it runs, a Hugging Face directory for everybody else."""

import json
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from distflow.errors import ConfigError, suggest

if TYPE_CHECKING:
    from distflow.engine.model import Source

LATEST, KIND = "latest", "kind"


def begin(folder: Path, step: int, first: bool) -> Path:
    """Where all workers write what belongs to a step; the `first` of them makes the place. Called by all at once."""
    making = folder / f"step_{step}.part"
    if first:
        shutil.rmtree(making, ignore_errors=True)
        making.mkdir(parents=True)
    dist.barrier()
    return making


def commit(folder: Path, step: int, first: bool) -> None:
    """Give it its final name, once everybody has written."""
    place = folder / f"step_{step}"
    dist.barrier()
    if first:
        shutil.rmtree(place, ignore_errors=True)
        (folder / f"step_{step}.part").rename(place)
        (folder / LATEST).write_text(json.dumps({"step": step}))
    dist.barrier()


def save_model(folder: Path, weights: Mapping[str, Tensor], source: "Source", group: dist.ProcessGroup | None) -> None:
    """The model of one role: every rank of `group` writes its own part."""
    dcp.save(dict(weights), checkpoint_id=folder / "weights", process_group=group)
    if dist.get_rank(group) == 0:
        source.config.save_pretrained(folder / "model")
        source.tokenizer.save_pretrained(folder / "model")
        if source.folder and (source.folder / "generation_config.json").exists():
            shutil.copy(source.folder / "generation_config.json", folder / "model")
        (folder / KIND).write_text(source.kind)


def export(run: Path, out: Path, step: int | None = None, role: str | None = None) -> Path:
    """The weights of a run as a directory that `from_pretrained` loads; the newest, or those of a step.

    Of the actor, if there is one and no other `role` is named.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
    from transformers.utils import logging

    folder = run / "checkpoints"
    pointer = folder / LATEST
    if not pointer.exists():
        raise ConfigError(f"{run}: has no checkpoint ({pointer} is not there); a run writes one when it ends")
    place = folder / f"step_{step if step is not None else json.loads(pointer.read_text())['step']}"
    if not place.is_dir():
        there = ", ".join(sorted(p.name.removeprefix("step_") for p in folder.glob("step_*")))
        raise ConfigError(f"{run}: has no checkpoint of step {step}; there are: {there}")
    place /= _role(place, role)
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out}: is not empty; choose another directory")
    config = AutoConfig.from_pretrained(place / "model")
    made = AutoModelForCausalLM if (place / KIND).read_text() == "words" else AutoModelForSequenceClassification
    with torch.device("meta"):
        model = made.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    weights: dict[str, Any] = {n: torch.empty(p.shape, dtype=torch.float32) for n, p in model.named_parameters()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this is one process is meant
        dcp.load(weights, checkpoint_id=place / "weights", no_dist=True)
    logging.disable_progress_bar()
    model.save_pretrained(out, state_dict=weights)
    AutoTokenizer.from_pretrained(place / "model").save_pretrained(out)
    if (place / "model" / "generation_config.json").exists():
        shutil.copy(place / "model" / "generation_config.json", out)
    return out


def _role(place: Path, role: str | None) -> str:
    there = sorted(p.name for p in place.iterdir() if p.is_dir())
    if role is None:
        return "actor" if "actor" in there or not there else there[0]
    if role not in there:
        raise ConfigError(f"{place}: has no role '{role}'{suggest(role, there)}")
    return role
