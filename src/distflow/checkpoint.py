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
from safetensors.torch import save_file
from torch import Tensor

from distflow.errors import ConfigError, suggest

if TYPE_CHECKING:
    from distflow.engine.lora import Adapter
    from distflow.engine.model import Source

LATEST, KIND = "latest", "kind"
ADAPTER, BASE = "adapter", "base.json"  # beside the weights, where those are only an adapter's


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


def save_model(
    folder: Path,
    weights: Mapping[str, Tensor],
    source: "Source",
    group: dist.ProcessGroup | None,
    adapter: "Adapter | None" = None,
) -> None:
    """The model of one role: every rank of `group` writes its own part. Of an adapter, where its base is, too."""
    dcp.save(dict(weights), checkpoint_id=folder / "weights", process_group=group)
    if dist.get_rank(group) == 0:
        source.config.save_pretrained(folder / "model")
        source.tokenizer.save_pretrained(folder / "model")
        if source.folder and (source.folder / "generation_config.json").exists():
            shutil.copy(source.folder / "generation_config.json", folder / "model")
        (folder / KIND).write_text(source.kind)
        if adapter:
            adapter.save(folder / ADAPTER, source.address)
            where = str(source.folder.resolve()) if source.folder else None
            base = {"name": source.name, "folder": where, "seed": source.seed}
            (folder / ADAPTER / BASE).write_text(json.dumps(base))


def export(run: Path, out: Path, step: int | None = None, role: str | None = None, base: str | None = None) -> Path:
    """The weights of a run as a directory that `from_pretrained` loads; the newest, or those of a step.

    Of the actor, if there is one and no other `role` is named. An adapter is merged into the model it was trained on,
    which is where it was then, or at `base`.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
    from transformers.utils import logging

    place = _place(run, out, step, role)
    config, tokenizer = AutoConfig.from_pretrained(place / "model"), AutoTokenizer.from_pretrained(place / "model")
    made = AutoModelForCausalLM if (place / KIND).read_text() == "words" else AutoModelForSequenceClassification
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
def _merged(place: Path, adapter: Mapping[str, Tensor], shapes: Mapping[str, Any], base: "Source") -> dict[str, Tensor]:
    from distflow.engine.lora import merge, pairs

    said = json.loads((place / ADAPTER / "adapter_config.json").read_text())
    beside, scale, read = pairs(adapter), said["lora_alpha"] / said["r"], base.reader(list(shapes))
    parts = {name: tuple(map(slice, shape)) for name, shape in shapes.items()}
    return {name: merge(read(name, part).float(), beside.get(name), scale) for name, part in parts.items()}


def export_adapter(run: Path, out: Path, step: int | None = None, role: str | None = None) -> Path:
    """The adapter alone, as PEFT writes it."""
    from distflow.engine.lora import in_file

    place = _place(run, out, step, role)
    if not (place / ADAPTER).is_dir():
        raise ConfigError(f"{run}: '{place.name}' was trained without an adapter; export it without --adapter")
    out.mkdir(parents=True, exist_ok=True)
    save_file({in_file(n): w for n, w in _weights(place).items()}, out / "adapter_model.safetensors", {"format": "pt"})
    shutil.copy(place / ADAPTER / "adapter_config.json", out)
    return out


def _place(run: Path, out: Path, step: int | None, role: str | None) -> Path:
    """Where the weights of a role are; `out` can take them."""
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
    return place


def _weights(place: Path) -> dict[str, Any]:
    """What the workers have written, put together."""
    there = dcp.FileSystemReader(place / "weights").read_metadata().state_dict_metadata
    weights: dict[str, Any] = {name: torch.empty(said.size) for name, said in there.items()}  # type: ignore[union-attr]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this is one process is meant
        dcp.load(weights, checkpoint_id=place / "weights", no_dist=True)
    return weights


def _base(place: Path, config: Any, tokenizer: Any, given: str | None) -> "Source":
    """The model that an adapter was trained on; one that was made on the spot is made again."""
    from distflow.engine.model import Source, find_folder

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
