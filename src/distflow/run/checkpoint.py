"""What a run keeps, so that it can go on later: written by all workers at once, each its part, behind the steps.

A checkpoint is complete or not there: it is written under another name, gets its own when all of it is on disk with
checksums, and only then does the pointer name it. Tensors are sharded safetensors by torch.distributed.checkpoint, so
any other number of workers can read them; everything else is JSON. Nothing is pickled.
"""

import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.tensor import DTensor

from distflow.engine.role_state import RoleState, shard_like
from distflow.errors import CheckpointError, PeerLostError, cut

LATEST, COMPLETE, STATE, VALUES, TENSORS = "latest", "complete.json", "state.json", "values.json", "tensors"
_STEP = re.compile(r"step_([0-9]{1,18})\Z")


@dataclass(frozen=True)
class Team:
    """The workers that have a role, and a process group of theirs for nothing but checkpoints."""

    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None


class Saver:
    """Writes checkpoints of a run in a thread of its own. To be called by all workers alike."""

    def __init__(self, folder: Path, rank: int, everybody: Team, teams: Mapping[str, Team]) -> None:
        self.folder, self.rank, self.everybody, self.teams = folder, rank, everybody, teams
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._running: Future[None] | None = None

    def save(
        self, step: int, parts: Mapping[str, RoleState], state: Mapping[str, Any], after: Callable[[Path], None]
    ) -> None:
        """Take a copy and write it behind the next steps; `after` is what rank 0 does with the finished one.

        Waits for the one before, and raises what went wrong with it.
        """
        self.wait()
        copies = {role: _copied(state) for role, state in parts.items()}
        self._running = self._thread.submit(self._write, step, copies, dict(state), after)

    def wait(self) -> None:
        """Until nothing is being written."""
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def close(self) -> None:
        self._thread.shutdown()

    def _write(
        self, step: int, parts: Mapping[str, RoleState], state: dict[str, Any], after: Callable[[Path], None]
    ) -> None:
        place, making = place_of(self.folder, step), self.folder / f"step_{step}.part"
        stages: list[Callable[[], None]] = [
            lambda: self._begin(making),
            lambda: self._fill(making, parts, {"step": step, **state}),
            lambda: self._commit(making, place, step, after),
        ]
        for stage in stages:
            error: BaseException | None = None
            try:
                stage()
            except (OSError, CheckpointException, ValueError) as e:
                error = e
            except RuntimeError as e:
                raise PeerLostError(f"lost a worker while writing {place}: {str(e).splitlines()[0]}") from e
            if not self._all_well(error is None):
                if self.rank == 0:
                    shutil.rmtree(making, ignore_errors=True)
                told = _reason(error) if error else "another worker could not write its part"
                raise CheckpointError(f"{place}: could not be written: {told}") from error

    def _begin(self, making: Path) -> None:
        if self.rank == 0:
            shutil.rmtree(making, ignore_errors=True)
            making.mkdir(parents=True)

    def _fill(self, making: Path, parts: Mapping[str, RoleState], state: Mapping[str, Any]) -> None:
        mine: list[Path] = []
        for role, part in parts.items():
            team, folder = self.teams[role], making / role
            folder.mkdir(exist_ok=True)
            if part.tensors:
                _save_tensors(folder / TENSORS, part.tensors, team.group)
                number = 1 + team.ranks.index(self.rank)
                mine += sorted((folder / TENSORS).glob(f"shard-{number:05}-*"))
            if self.rank == team.ranks[0]:
                (folder / VALUES).write_text(_as_json(part.values, role))
                part.describe(folder)
                mine += [p for p in folder.rglob("*") if p.is_file() and p.parent.name != TENSORS]
        if self.rank == 0:
            (making / STATE).write_text(json.dumps(state))
            mine.append(making / STATE)
        sums = {str(p.relative_to(making)): [p.stat().st_size, _sum(p)] for p in mine}
        written = making / f"sums.{self.rank}.json"
        written.write_text(json.dumps(sums))
        for p in (*mine, written):
            _sync(p)

    def _commit(self, making: Path, place: Path, step: int, after: Callable[[Path], None]) -> None:
        if self.rank:
            return
        lists = {p.name: _sum(p) for p in making.glob("sums.*.json")}
        write_whole(making / COMPLETE, json.dumps({"step": step, "lists": lists}))
        _sync(making)
        old = self.folder / f"step_{step}.old"
        shutil.rmtree(old, ignore_errors=True)
        if place.exists():
            place.rename(old)
        making.rename(place)
        shutil.rmtree(old, ignore_errors=True)
        write_whole(self.folder / LATEST, json.dumps({"step": step}))
        after(place)

    def _all_well(self, well: bool) -> bool:
        if self.everybody.group is None:
            return well
        flag = torch.tensor([int(well)])
        dist.all_reduce(flag, dist.ReduceOp.MIN, group=self.everybody.group)
        return bool(flag)


def place_of(folder: Path, step: int) -> Path:
    return folder / f"step_{step}"


def steps_there(folder: Path) -> list[int]:
    """Steps of which there is a checkpoint, newest first."""
    try:
        found = [_step_of(p.parent.name) for p in folder.glob(f"step_*/{COMPLETE}")]
    except OSError:  # not even a folder could be called so
        return []
    return sorted((n for n in found if n is not None), reverse=True)


def _step_of(name: str) -> int | None:
    match = _STEP.match(name)
    return int(match[1]) if match else None


def damage(place: Path, share: int = 0, of: int = 1) -> str | None:
    """What is wrong with a checkpoint, if anything; of `of` workers, each looks at its share of the files."""
    try:
        lists = json.loads((place / COMPLETE).read_text())["lists"]
        sums: dict[str, tuple[int, str]] = {}
        for name, expected in sorted(lists.items()):
            if _sum(place / name) != expected:
                return f"{place / name} is not what was written"
            listed = json.loads((place / name).read_text())
            sums |= {file: (int(size), str(told)) for file, (size, told) in listed.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        return f"{place}: its list of files cannot be read ({_reason(e)})"
    if STATE not in sums:
        return f"{place}: its list of files is not whole"
    for name, (size, expected) in sorted(sums.items())[share::of]:
        path = place / name
        if not path.is_file():
            return f"{path} is missing"
        if path.stat().st_size != size:
            return f"{path} has {path.stat().st_size} bytes of {size}"
        try:
            same = _sum(path) == expected
        except OSError as e:
            return f"{path} cannot be read ({_reason(e)})"
        if not same:
            return f"{path} is not what was written"
    return None


def read_state(place: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((place / STATE).read_text())
    return state


def read_values(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / VALUES).read_text())
    return values


def load_tensors(folder: Path, into: Mapping[str, Tensor], process_group: dist.ProcessGroup | None) -> None:
    """Fill tensors, or this worker's shards of them, whatever the shards were when they were written."""
    with _reading(folder), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # without a group this is one process, which is meant
        reader = HuggingFaceStorageReader(str(folder / TENSORS))
        dcp.load(dict(into), storage_reader=reader, process_group=process_group, no_dist=process_group is None)


def load_whole(folder: Path, prefix: str = "") -> dict[str, Tensor]:
    """All tensors whose names begin with `prefix`, without it, in one process."""
    with _reading(folder):
        there = HuggingFaceStorageReader(str(folder / TENSORS)).read_metadata().state_dict_metadata
    into = {n: torch.empty(m.size) for n, m in there.items() if n.startswith(prefix)}  # type: ignore[union-attr]
    load_tensors(folder, into, None)
    return {name.removeprefix(prefix): t for name, t in into.items()}


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    try:
        yield
    except (CheckpointException, SafetensorError, OSError, ValueError, LookupError, TypeError, AssertionError) as e:
        raise CheckpointError(
            f"{folder / TENSORS}: cannot be read: {cut(_reason(e), 400)}; take another one, or the model it is of"
        ) from e


def prune(folder: Path, keep: int, best: Sequence[int] = ()) -> None:
    """All but the newest `keep` and these steps are removed, and what was never finished."""
    there = steps_there(folder)
    for step in there[keep:]:
        if step not in best:
            shutil.rmtree(place_of(folder, step), ignore_errors=True)
    for left in folder.glob("step_*.part"):
        of = _step_of(left.name.removesuffix(".part"))
        if of is not None and (not there or of <= there[0]):
            shutil.rmtree(left, ignore_errors=True)


def set_aside(folder: Path) -> None:
    """Checkpoints of an earlier run in the same place keep theirs under another name."""
    if steps_there(folder):
        n = next(n for n in range(1, 1 << 30) if not folder.with_name(f"{folder.name}.{n}").exists())
        folder.rename(folder.with_name(f"{folder.name}.{n}"))


def write_whole(path: Path, text: str) -> None:
    """There is the old file or the new one, never half of it."""
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    _sync(part)
    part.rename(path)
    _sync(path.parent)


def _save_tensors(folder: Path, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> None:
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    dcp.save(dict(tensors), storage_writer=writer, process_group=group)


def _copied(state: RoleState) -> RoleState:
    """Copies the tensors as they are now, for the writer in the background."""
    return replace(state, tensors={name: _copy(t) for name, t in state.tensors.items()})


def _copy(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, DTensor):
        return tensor.detach().clone()
    return shard_like(tensor, tensor.to_local().detach().clone())


def _as_json(values: Mapping[str, Any], role: str) -> str:
    try:
        return json.dumps(values)
    except (TypeError, ValueError, RecursionError) as e:
        raise ValueError(f"the state of the role '{role}' is not plain values, as JSON has them: {e}") from None


def _sum(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _reason(error: BaseException) -> str:
    if isinstance(error, CheckpointException):  # what happened on each rank
        return "; ".join(f"rank {r}: {e[0]}" for r, e in sorted(error.failures.items()))
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__
