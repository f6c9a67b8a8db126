"""Writes checkpoints while the next steps run: all workers at once, each its own shards.

A checkpoint is complete or absent: it is written under another name, gets its own once all of it is on disk with
checksums, and only then does the file `latest` name it.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

from distflow.engine.role_state import RoleState
from distflow.errors import CheckpointError, PeerLostError
from distflow.run.checkpoint import (
    COMPLETE,
    FORMAT,
    LATEST,
    STATE,
    TENSORS,
    VALUES,
    checkpoint_dir,
    describe_error,
    fsync,
    sha256,
    write_atomically,
)


@dataclass(frozen=True)
class Members:
    """The ranks that hold a state together, and their process group for checkpoints; None for a single process."""

    ranks: tuple[int, ...]
    process_group: dist.ProcessGroup | None


class CheckpointWriter:
    """Writes the checkpoints of a run in a thread of its own. All workers call it alike."""

    def __init__(self, folder: Path, rank: int, all_workers: Members, roles: Mapping[str, Members]) -> None:
        self.folder, self.rank, self.all_workers, self.roles = folder, rank, all_workers, roles
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._running: Future[None] | None = None

    def save(
        self,
        step: int,
        role_states: Mapping[str, RoleState],
        run_state: Mapping[str, Any],
        on_complete: Callable[[Path], None],
    ) -> None:
        """Copies the states and writes them in the background; rank 0 then calls `on_complete` with the checkpoint.

        Waits for the checkpoint before, and raises what went wrong with it.
        """
        self.wait()
        copies = {role: _copy_tensors(state) for role, state in role_states.items()}
        self._running = self._thread.submit(self._write, step, copies, dict(run_state), on_complete)

    def wait(self) -> None:
        """Waits until no checkpoint is being written."""
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def close(self) -> None:
        self._thread.shutdown()

    def _write(
        self,
        step: int,
        role_states: Mapping[str, RoleState],
        run_state: dict[str, Any],
        on_complete: Callable[[Path], None],
    ) -> None:
        path, partial = checkpoint_dir(self.folder, step), self.folder / f"step_{step}.part"
        stages: list[Callable[[], None]] = [
            lambda: self._create(partial),
            lambda: self._write_files(partial, role_states, {"step": step, **run_state}),
            lambda: self._commit(partial, path, step, on_complete),
        ]
        for stage in stages:
            error: BaseException | None = None
            try:
                stage()
            except (OSError, CheckpointException, ValueError) as e:
                error = e
            except RuntimeError as e:
                raise PeerLostError(f"lost a worker while writing {path}: {str(e).splitlines()[0]}") from e
            if not self._all_succeeded(error is None):
                if self.rank == 0:
                    shutil.rmtree(partial, ignore_errors=True)
                reason = describe_error(error) if error else "another worker could not write its files"
                raise CheckpointError(f"{path}: could not be written: {reason}") from error

    def _create(self, partial: Path) -> None:
        if self.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)

    def _write_files(self, partial: Path, role_states: Mapping[str, RoleState], run_state: Mapping[str, Any]) -> None:
        own: list[Path] = []
        for role, state in role_states.items():
            members, folder = self.roles[role], partial / role
            folder.mkdir(exist_ok=True)
            if state.tensors:
                _save_tensors(folder / TENSORS, state.tensors, members.process_group)
                number = 1 + members.ranks.index(self.rank)
                own += sorted((folder / TENSORS).glob(f"shard-{number:05}-*"))
            if self.rank == members.ranks[0]:
                (folder / VALUES).write_text(_to_json(state.values, role))
                state.describe(folder)
                own += [p for p in folder.rglob("*") if p.is_file() and p.parent.name != TENSORS]
        if self.rank == 0:
            (partial / STATE).write_text(json.dumps(run_state))
            own.append(partial / STATE)
        checksums = {str(p.relative_to(partial)): [p.stat().st_size, sha256(p)] for p in own}
        listing = partial / f"checksums.{self.rank}.json"
        listing.write_text(json.dumps(checksums))
        for p in (*own, listing):
            fsync(p)

    def _commit(self, partial: Path, path: Path, step: int, on_complete: Callable[[Path], None]) -> None:
        if self.rank:
            return
        listings = {p.name: sha256(p) for p in partial.glob("checksums.*.json")}
        write_atomically(partial / COMPLETE, json.dumps({"format": FORMAT, "step": step, "checksums": listings}))
        fsync(partial)
        old = self.folder / f"step_{step}.old"
        shutil.rmtree(old, ignore_errors=True)
        if path.exists():
            path.rename(old)
        partial.rename(path)
        shutil.rmtree(old, ignore_errors=True)
        write_atomically(self.folder / LATEST, json.dumps({"step": step}))
        on_complete(path)

    def _all_succeeded(self, success: bool) -> bool:
        if self.all_workers.process_group is None:
            return success
        flag = torch.tensor([int(success)])
        dist.all_reduce(flag, dist.ReduceOp.MIN, group=self.all_workers.process_group)
        return bool(flag)


def _save_tensors(folder: Path, tensors: Mapping[str, Tensor], process_group: dist.ProcessGroup | None) -> None:
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    dcp.save(dict(tensors), storage_writer=writer, process_group=process_group)


def _copy_tensors(state: RoleState) -> RoleState:
    """Copies the tensors as they are now to host memory, for the thread that writes them."""
    return replace(state, tensors={name: t.detach().to("cpu", copy=True) for name, t in state.tensors.items()})


def _to_json(values: Mapping[str, Any], role: str) -> str:
    try:
        return json.dumps(values)
    except (TypeError, ValueError, RecursionError) as e:
        raise ValueError(f"the state of the role '{role}' is not made of plain JSON values: {e}") from None
