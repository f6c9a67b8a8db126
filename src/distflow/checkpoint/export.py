"""Exports the weights of a run: as a Hugging Face directory, or as PEFT's files of an adapter."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from distflow.checkpoint.model import find_role, open_checkpoint
from distflow.checkpoint.model_card import write_card
from distflow.checkpoint.store import (
    foreign_file,
    format_problem,
    list_checkpoints,
    load_full_tensors,
    verify,
)
from distflow.errors import ConfigError, cut, short_reason
from distflow.model.description import ADAPTER, MODEL
from distflow.model.lora import peft_name
from distflow.model.processor import save_processor
from distflow.model.stored_names import read_stacked
from distflow.run_folder import CHECKPOINTS, checkpoint_dir
from distflow.util.files import PARTIAL, way_out
from distflow.weights.state import EMA, WEIGHTS


def export(
    run: Path,
    out: Path,
    step: int | None = None,
    role: str | None = None,
    base: str | None = None,
    dtype: torch.dtype | None = None,
    ema: bool = False,
) -> Path:
    """Writes the weights of a run as a directory that `from_pretrained` loads: the newest, or those of `step`.

    They are the actor's, if there is one and no other `role` is given, in the dtype of the model it was trained from
    unless `dtype` is another; with `ema` their moving average. An adapter is merged into the model it was trained on,
    which is read from where it was then, or from `base`.
    """
    folder = _role_dir(run, out, step, role)
    export_role(folder, out, base, dtype, EMA if ema else WEIGHTS)
    write_card(out, run, folder.parent, "transformers")
    return out


def export_role(
    folder: Path, out: Path, base: str | None = None, dtype: torch.dtype | None = None, prefix: str = WEIGHTS
) -> Path:
    """Exports one role from its folder in a checkpoint. Runs no code that comes with it."""
    from transformers.utils import logging

    with _reading(folder):
        source = open_checkpoint(folder, base, prefix)
        if source.head == "value" and source.processor:
            raise ValueError("no class of transformers loads a vision-language model with a value head")
        dtype = dtype or getattr(source.config, "dtype", None) or torch.float32
        with torch.device("meta"):
            model = source.model_class.from_config(source.config, dtype=dtype, trust_remote_code=False)
        shapes = {name: p.shape for name, p in model.named_parameters()}
        read = source.reader(shapes)
        weights = {name: read_stacked(read, name, shape).to(dtype) for name, shape in shapes.items()}
    logging.disable_progress_bar()
    with _complete_or_absent(out) as part:
        model.save_pretrained(part, state_dict=weights)
        source.tokenizer.save_pretrained(part)
        if source.processor:
            save_processor(source.processor, folder / MODEL, part)
        if (folder / MODEL / "generation_config.json").exists():
            shutil.copy(folder / MODEL / "generation_config.json", part)
    return out


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    """Names the role in any error of reading: a foreign checkpoint may have anything in it."""
    try:
        yield
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError) as e:
        raise ConfigError(f"{folder}: cannot be exported: {cut(short_reason(e), 400)}; use another checkpoint") from e


def export_adapter(run: Path, out: Path, step: int | None = None, role: str | None = None, ema: bool = False) -> Path:
    """Writes the adapter alone, in PEFT's format."""
    folder = _role_dir(run, out, step, role)
    if not (folder / ADAPTER).is_dir():
        raise ConfigError(f"{run}: '{folder.name}' was trained without an adapter; export it without --adapter")
    weights = {peft_name(n): w for n, w in load_full_tensors(folder, EMA if ema else WEIGHTS).items()}
    with _complete_or_absent(out) as part:
        save_file(weights, part / "adapter_model.safetensors", {"format": "pt"})
        shutil.copy(folder / ADAPTER / "adapter_config.json", part)
    write_card(out, run, folder.parent, "peft")
    return out


@contextmanager
def _complete_or_absent(out: Path) -> Iterator[Path]:
    """Gives a folder in `out` to write to, and moves the files to `out` when all are there; the config, without which
    nothing loads it, last."""
    part = out / PARTIAL  # files that are not complete
    shutil.rmtree(part, ignore_errors=True)
    try:
        part.mkdir(parents=True)
        yield part
        for file in sorted(part.iterdir(), key=lambda p: p.name in ("config.json", "adapter_config.json")):
            file.rename(out / file.name)
        part.rmdir()
    except (OSError, SafetensorError) as e:
        what, advice = _failed_file(e), way_out(out, e)
        shutil.rmtree(part, ignore_errors=True)
        raise ConfigError(f"{out}: {what} could not be written: {short_reason(e)}; {advice}") from e


def _failed_file(error: OSError | SafetensorError) -> str:
    """Names what could not be written, as far as the error says it."""
    if isinstance(error, OSError):
        return Path(error.filename).name if error.filename else "a file"
    return "the weights"  # in files with names of transformers' choice


def _role_dir(run: Path, out: Path, step: int | None, role: str | None) -> Path:
    """Returns the folder of a role in a complete checkpoint, and makes sure that `out` is an empty directory."""
    checkpoints = run / CHECKPOINTS
    steps = list_checkpoints(checkpoints)
    if not steps:
        raise ConfigError(f"{run}: has no checkpoint in {checkpoints}; a run writes one when it ends")
    if step is not None and step not in steps:
        raise ConfigError(f"{run}: has no checkpoint of step {step}; there are: {', '.join(map(str, steps[::-1]))}")
    step = steps[0] if step is None else step
    path = checkpoint_dir(checkpoints, step)
    if problem := foreign_file(path):
        raise ConfigError(f"{problem}; export a checkpoint as it was written")
    if problem := format_problem(path):
        raise ConfigError(problem)
    if problem := verify(path, kind="state"):
        others = ", ".join(str(s) for s in steps if s != step)
        raise ConfigError(f"{problem}; export another step: {others or 'there is none'}")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as e:
        raise ConfigError(f"{out}: cannot be written: {getattr(e, 'strerror', e)}; choose another directory") from None
    if any(entry.name != PARTIAL for entry in out.iterdir()):
        raise ConfigError(f"{out}: is not empty; choose another directory")
    return find_role(path, role)
