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

from distflow.errors import ConfigError

if TYPE_CHECKING:
    from distflow.engine.model import Source

LATEST = "latest"


def save(
    folder: Path, step: int, weights: Mapping[str, Tensor], source: "Source", group: dist.ProcessGroup | None
) -> None:
    """Every rank of `group` writes its own part; what is there under its final name is complete."""
    first = dist.get_rank(group) == 0
    place, making = folder / f"step_{step}", folder / f"step_{step}.part"
    if first:
        shutil.rmtree(making, ignore_errors=True)
        making.mkdir(parents=True)
    dist.barrier(group)
    dcp.save(dict(weights), checkpoint_id=making / "weights", process_group=group)
    if first:
        source.config.save_pretrained(making / "model")
        source.tokenizer.save_pretrained(making / "model")
        if source.folder and (source.folder / "generation_config.json").exists():
            shutil.copy(source.folder / "generation_config.json", making / "model")
        shutil.rmtree(place, ignore_errors=True)
        making.rename(place)
        (folder / LATEST).write_text(json.dumps({"step": step}))
    dist.barrier(group)


def export(run: Path, out: Path, step: int | None = None) -> Path:
    """The weights of a run as a directory that `from_pretrained` loads; the newest, or those of a step."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    folder = run / "checkpoints"
    pointer = folder / LATEST
    if not pointer.exists():
        raise ConfigError(f"{run}: has no checkpoint ({pointer} is not there); a run writes one when it ends")
    place = folder / f"step_{step if step is not None else json.loads(pointer.read_text())['step']}"
    if not place.is_dir():
        there = ", ".join(sorted(p.name.removeprefix("step_") for p in folder.glob("step_*")))
        raise ConfigError(f"{run}: has no checkpoint of step {step}; there are: {there}")
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out}: is not empty; choose another directory")
    config = AutoConfig.from_pretrained(place / "model")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
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
