"""Checkpoints on disk: which there are, whether one is complete, and how its files are read.

Tensors are in safetensors files, one of each worker, and `tensor_index` says which part of a tensor is where, so that
any number of workers can read them, each only the files that it needs. Everything else is JSON. Nothing is pickled.
`writer` writes them.
"""

import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from distflow.checkpoint.tensor_index import Piece, TensorIndex, file_name
from distflow.errors import CheckpointError, cut, short_reason
from distflow.run_folder import CHECKPOINTS, COMPLETE, HUGGINGFACE, checkpoint_dir
from distflow.util.files import PARTIAL
from distflow.weights.shards import Box, within
from distflow.weights.state import RoleState

FORMAT = 3  # raised when a checkpoint of before can no longer be read; the first one had no number
RUN_STATE, VALUES, TENSORS, INDEX = "state.json", "values.json", "tensors", "index.json"
_Files = Mapping[int, Sequence[tuple[str, Piece]]]  # by place in the layout: what the file has of which tensor
_NAME = re.compile(r"step_([0-9]{1,18})\Z")


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


def names_of_checkpoints(folder: Path) -> list[str]:
    """Returns the checkpoints below a folder, newest first: itself, or those in it, or in `checkpoints` in it."""
    if (folder / COMPLETE).exists():
        return ["."]
    inner = CHECKPOINTS if (folder / CHECKPOINTS).is_dir() else "."
    return [str(checkpoint_dir(Path(inner), step)) for step in list_checkpoints(folder / inner)]


def format_problem(path: Path) -> str | None:
    """Returns the reason why this version cannot read a checkpoint; None if it can, or if the checkpoint is damaged."""
    try:
        complete = _read_complete(path)
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


Files = Mapping[str, tuple[int, str]]  # name in the checkpoint → bytes, SHA-256


def file_list(step: int, files: Files) -> str:
    """Returns the contents of complete.json: all files with their checksums, and a checksum of this list."""
    contents = {"format": FORMAT, "step": step, "files": files}
    return json.dumps(contents | {"checksum": _checksum(contents)})


def _checksum(contents: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()


def verify(path: Path, share: int = 0, shares: int = 1, kind: Literal["all", "state", "export"] = "all") -> str | None:
    """Returns the first error in a checkpoint, None if it is intact. Each of `shares` workers can check its share.

    `kind`: of which files. Nothing but the `state` is needed to resume; the `export` is for others.
    """
    try:
        contents = _read_complete(path)
        if contents.pop("checksum") != _checksum(contents):
            return f"{path / COMPLETE} has changed since it was written"
        files = {name: (int(size), str(checksum)) for name, (size, checksum) in contents["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        return f"{path}: its list of files cannot be read ({short_reason(e)})"
    if RUN_STATE not in files:
        return f"{path}: its list of files is not complete"
    for name in files:
        if name.startswith("/") or ".." in name.split("/"):
            return f"{path}: its list names a file that is not in it, {cut(name)}"
    for name in _share([n for n in files if kind in ("all", _kind(n))], share, shares):
        if problem := _file_problem(path / name, *files[name]):
            return problem
    return None


def _kind(name: str) -> str:
    return "export" if name.startswith(f"{HUGGINGFACE}/") else "state"


def _read_complete(path: Path) -> Any:
    if problem := _kind_problem(path / COMPLETE):  # a device or a pipe might never end
        raise ValueError(problem)
    return json.loads((path / COMPLETE).read_text())


def foreign_file(path: Path) -> str | None:
    """Returns what in a checkpoint is neither a file nor a folder, such as a link out of it; None if nothing is."""
    for folder, names, files in os.walk(path):
        for name in (*names, *files):
            file = Path(folder, name)
            if problem := _kind_problem(file, folders=True):
                return problem
    return None


def _kind_problem(file: Path, folders: bool = False) -> str | None:
    mode = file.lstat().st_mode
    if stat.S_ISREG(mode) or (folders and stat.S_ISDIR(mode)):
        return None
    return f"{file} is {'a symbolic link' if stat.S_ISLNK(mode) else 'not a regular file'}, which no checkpoint has"


def _share(names: Iterable[str], share: int, shares: int) -> list[str]:
    """Returns equally many files for each worker; of files with tensors, the ones it is likely to read next."""
    kinds: dict[tuple[str, str], list[str]] = {}  # by folder and suffix: the tensors of a role are one
    for name in sorted(names):
        kinds.setdefault((name.rpartition("/")[0], name.rpartition(".")[2]), []).append(name)
    return [n for kind in kinds.values() for i, n in enumerate(kind) if i * shares // len(kind) == share]


def _file_problem(file: Path, size: int, checksum: str) -> str | None:
    try:
        if not os.path.lexists(file):
            return f"{file} is missing"
        if problem := _kind_problem(file):
            return problem
        if file.stat().st_size != size:
            return f"{file} has {file.stat().st_size} bytes of {size}"
        return f"{file} has changed since it was written" if sha256(file) != checksum else None
    except (OSError, ValueError) as e:
        return f"{file} cannot be read ({short_reason(e)})"


def read_state(path: Path, *keys: str) -> dict[str, Any]:
    """Returns the state of the run in a checkpoint: step, position, and at least these keys."""
    state = _read_json(path / RUN_STATE)
    counts = [state.get(key) for key in ("step", "position")] if isinstance(state, dict) else [None]
    if not all(type(n) is int and n >= 0 for n in counts) or not state.keys() >= set(keys):
        raise CheckpointError(f"{path / RUN_STATE} is not the state of a run; use another checkpoint")
    return dict(state)


def read_values(folder: Path) -> Any:
    """Returns the plain values of a role in its folder of a checkpoint."""
    return _read_json(folder / VALUES)


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as e:
        raise CheckpointError(f"{file} cannot be read ({short_reason(e)}); use another checkpoint") from e


def load_tensors(folder: Path, state: RoleState, rank: int) -> None:
    """Fills the tensors of a state, this worker's parts of them, however they were cut when they were written."""
    with _reading(folder):
        index = read_index(folder)
        wanted = {}
        for name, tensor in state.tensors.items():
            if name not in index.tensors:
                raise ValueError(f"there is no tensor '{cut(name)}'")
            stored, shape = index.tensors[name].shape, tuple((state.specs.get(name) or tensor).shape)
            if stored != shape:
                raise ValueError(f"the tensor '{cut(name)}' has the shape {stored}, and should have {shape}")
            wanted[name] = (state.box(name, rank), tensor)
        files = _locate(folder / TENSORS, index, {name: box for name, (box, _) in wanted.items()})
        _fill(folder / TENSORS, index, wanted, files)


def load_full_tensors(folder: Path, prefix: str = "") -> dict[str, Tensor]:
    """Returns all tensors whose names start with `prefix`, whole and without the prefix, in one process."""
    if not (folder / TENSORS).is_dir():
        return {}
    with _reading(folder):
        index = read_index(folder)
        boxes = {n: tuple((0, size) for size in t.shape) for n, t in index.tensors.items() if n.startswith(prefix)}
        files = _locate(folder / TENSORS, index, boxes)  # before memory is taken for what an index says
        tensors = {name: torch.empty(index.tensors[name].shape, dtype=index.tensors[name].dtype) for name in boxes}
        wanted = {name: (box, tensors[name]) for name, box in boxes.items()}
        _fill(folder / TENSORS, index, wanted, files)
    return {name.removeprefix(prefix): tensor for name, (_, tensor) in wanted.items()}


def part_reader(folder: Path, prefix: str) -> Callable[[str, tuple[slice, ...]], Tensor]:
    """Returns a function that reads a part of a tensor, by its name without the prefix."""
    with _reading(folder):
        index = read_index(folder)
        if not any(name.startswith(prefix) for name in index.tensors):
            raise ValueError(f"there is no tensor '{prefix}…'")

    def read(name: str, part: tuple[slice, ...]) -> Tensor:
        with _reading(folder):
            stored = index.tensors[prefix + name]
            box = tuple(s.indices(n)[:2] for s, n in zip(part, stored.shape, strict=True))
            files = _locate(folder / TENSORS, index, {prefix + name: box})
            tensor = torch.empty([hi - lo for lo, hi in box], dtype=stored.dtype)
            _fill(folder / TENSORS, index, {prefix + name: (box, tensor)}, files)
            return tensor

    return read


def read_index(folder: Path) -> TensorIndex:
    """Returns the tensor index of a role's folder in a checkpoint."""
    return TensorIndex.from_json((folder / TENSORS / INDEX).read_text())


def _locate(folder: Path, index: TensorIndex, boxes: Mapping[str, Box]) -> _Files:
    """Returns which file has what of the parts of tensors; raises if one has not what the index says."""
    files: dict[int, list[tuple[str, Piece]]] = {}
    for name, box in boxes.items():
        for piece in index.pieces(name, box):
            if piece.place not in files and not (folder / file_name(piece.place)).is_file():
                raise ValueError(f"{file_name(piece.place)} is missing")  # before a false index is believed any further
            files.setdefault(piece.place, []).append((name, piece))
    for place, pieces in files.items():
        with safe_open(folder / file_name(place), "pt") as file:
            for name, piece in pieces:
                if file.get_slice(name).get_shape() != [hi - lo for lo, hi in piece.part]:
                    raise ValueError(f"{file_name(place)} has another part of '{cut(name)}' than the index says")
    return files


def _fill(folder: Path, index: TensorIndex, wanted: Mapping[str, tuple[Box, Tensor]], files: _Files) -> None:
    """Reads parts of tensors into memory; opens each file once."""
    for place, pieces in sorted(files.items()):
        with safe_open(folder / file_name(place), "pt") as file:
            for name, piece in pieces:
                box, tensor = wanted[name]
                part = file.get_slice(name)[within(piece.part, piece.inner)]
                if part.dtype != index.tensors[name].dtype:
                    raise ValueError(f"'{cut(name)}' is {part.dtype} in {file_name(place)}")
                with torch.no_grad():
                    tensor[within(box, piece.inner)].copy_(part)


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError, ValueError, LookupError, TypeError, RuntimeError, MemoryError) as e:
        raise CheckpointError(
            f"{folder / TENSORS}: cannot be read: {cut(short_reason(e), 400)};"
            " use another checkpoint, or the model that this one was trained from"
        ) from e


def prune(folder: Path, keep: int, best: Sequence[int] = ()) -> None:
    """Removes incomplete checkpoints, and all others but the newest `keep` and the `best`."""
    steps = list_checkpoints(folder)
    for step in steps[keep:]:
        if step not in best:
            shutil.rmtree(checkpoint_dir(folder, step), ignore_errors=True)
    for partial in folder.glob(f"step_*{PARTIAL}"):
        partial_step = _step_of(partial.name.removesuffix(PARTIAL))
        if partial_step is not None and (not steps or partial_step <= steps[0]):
            shutil.rmtree(partial, ignore_errors=True)


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
