"""Checkpoints on disk: which there are, whether one is complete, and how its files are read.

Tensors are sharded safetensors by torch.distributed.checkpoint, so that any number of workers can read them; everything
else is JSON. Nothing is pickled. `checkpoint_writer` writes them.
"""

import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from distflow.errors import CheckpointError, cut

FORMAT = 2  # raised when a checkpoint of before can no longer be read; the first one had no number
COMPLETE, STATE, VALUES, TENSORS = "complete.json", "state.json", "values.json", "tensors"
LATEST, BEST = "latest", "best"  # files beside the checkpoints, each with the number of a step
_NAME = re.compile(r"step_([0-9]{1,18})\Z")


def checkpoint_dir(folder: Path, step: int) -> Path:
    return folder / f"step_{step}"


def list_checkpoints(folder: Path) -> list[int]:
    """Returns the steps that have a checkpoint, newest first."""
    try:
        steps = [_step_of(p.parent.name) for p in folder.glob(f"step_*/{COMPLETE}")]
    except OSError:  # the name is not even possible for a folder
        return []
    return sorted((s for s in steps if s is not None), reverse=True)


def _step_of(name: str) -> int | None:
    match = _NAME.match(name)
    return int(match[1]) if match else None


def format_problem(path: Path) -> str | None:
    """Returns why this version cannot read a checkpoint; None if it can, or if the checkpoint is damaged."""
    try:
        complete = json.loads((path / COMPLETE).read_text())
    except (OSError, ValueError, RecursionError):
        return None
    number = complete.get("format") if isinstance(complete, dict) else None
    if number == FORMAT:
        return None
    found = "no format number" if number is None else f"format {cut(str(number), 20)}"
    return (
        f"{path} was written by another version of DistFlow (it has {found}, this version reads format {FORMAT});"
        " export it with that version and start anew from the export (model: DIRECTORY), or use another run_dir"
    )


def verify(path: Path, share: int = 0, shares: int = 1) -> str | None:
    """Returns what is wrong with a checkpoint, None if nothing is. Each of `shares` workers can check its share."""
    try:
        lists = json.loads((path / COMPLETE).read_text())["checksums"]
        checksums: dict[str, tuple[int, str]] = {}
        for name, expected in sorted(lists.items()):
            if sha256(path / name) != expected:
                return f"{path / name} has changed since it was written"
            files = json.loads((path / name).read_text())
            checksums |= {file: (int(size), str(checksum)) for file, (size, checksum) in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        return f"{path}: its list of files cannot be read ({describe_error(e)})"
    if STATE not in checksums:
        return f"{path}: its list of files is not complete"
    for name, (size, expected) in sorted(checksums.items())[share::shares]:
        file = path / name
        if not file.is_file():
            return f"{file} is missing"
        if file.stat().st_size != size:
            return f"{file} has {file.stat().st_size} bytes of {size}"
        try:
            unchanged = sha256(file) == expected
        except OSError as e:
            return f"{file} cannot be read ({describe_error(e)})"
        if not unchanged:
            return f"{file} has changed since it was written"
    return None


def read_state(path: Path) -> dict[str, Any]:
    """Returns the state of the run in a checkpoint."""
    state: dict[str, Any] = json.loads((path / STATE).read_text())
    return state


def read_values(folder: Path) -> dict[str, Any]:
    """Returns the plain values of a role in its folder of a checkpoint."""
    values: dict[str, Any] = json.loads((folder / VALUES).read_text())
    return values


def load_tensors(folder: Path, into: Mapping[str, Tensor], process_group: dist.ProcessGroup | None) -> None:
    """Fills tensors, or this worker's shards of them, however they were sharded when they were written."""
    with _reading(folder), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DCP warns that without a process group it reads in one process, as is meant
        reader = HuggingFaceStorageReader(str(folder / TENSORS))
        dcp.load(dict(into), storage_reader=reader, process_group=process_group, no_dist=process_group is None)


def load_full_tensors(folder: Path, prefix: str = "") -> dict[str, Tensor]:
    """Returns all tensors whose names start with `prefix`, unsharded and without the prefix, in one process."""
    with _reading(folder):
        metadata = HuggingFaceStorageReader(str(folder / TENSORS)).read_metadata().state_dict_metadata
    tensors = {n: torch.empty(m.size) for n, m in metadata.items() if n.startswith(prefix)}  # type: ignore[union-attr]
    load_tensors(folder, tensors, None)
    return {name.removeprefix(prefix): t for name, t in tensors.items()}


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    try:
        yield
    except (CheckpointException, SafetensorError, OSError, ValueError, LookupError, TypeError, AssertionError) as e:
        raise CheckpointError(
            f"{folder / TENSORS}: cannot be read: {cut(describe_error(e), 400)};"
            " use another checkpoint, or the model that this one was trained from"
        ) from e


def prune(folder: Path, keep: int, best: Sequence[int] = ()) -> None:
    """Removes all checkpoints but the newest `keep` and the `best`, and those that were never completed."""
    steps = list_checkpoints(folder)
    for step in steps[keep:]:
        if step not in best:
            shutil.rmtree(checkpoint_dir(folder, step), ignore_errors=True)
    for partial in folder.glob("step_*.part"):
        partial_step = _step_of(partial.name.removesuffix(".part"))
        if partial_step is not None and (not steps or partial_step <= steps[0]):
            shutil.rmtree(partial, ignore_errors=True)


def archive_checkpoints(folder: Path) -> None:
    """Renames the folder with the checkpoints of an earlier run, so that a new one can be written."""
    if list_checkpoints(folder):
        n = next(n for n in range(1, 1 << 30) if not folder.with_name(f"{folder.name}.{n}").exists())
        folder.rename(folder.with_name(f"{folder.name}.{n}"))


def write_atomically(path: Path, text: str) -> None:
    """Replaces a file: whatever happens, there is the old one or the new one."""
    partial = path.with_name(path.name + ".part")
    partial.write_text(text)
    fsync(partial)
    partial.rename(path)
    fsync(path.parent)


def fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def describe_error(error: BaseException) -> str:
    if isinstance(error, CheckpointException):  # has the errors of all ranks
        return "; ".join(f"rank {r}: {e[0]}" for r, e in sorted(error.failures.items()))
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__
