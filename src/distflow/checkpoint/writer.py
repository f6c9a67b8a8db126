"""Writes checkpoints while the next steps run: each worker writes the parts that it owns, without agreement.

A checkpoint is complete or absent: it is written under another name, gets its own once all of it is on disk with
checksums, and only then does the file `latest` name it.
"""

import json
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from distflow.checkpoint.store import (
    INDEX,
    RUN_STATE,
    TENSORS,
    VALUES,
    file_list,
    sha256,
)
from distflow.checkpoint.tensor_index import TensorIndex, file_name
from distflow.comm.collectives import Communication, all_gather, all_gather_bytes, all_reduce
from distflow.errors import CheckpointError, DistflowError, cut, short_reason
from distflow.run_folder import COMPLETE, HUGGINGFACE, LATEST, checkpoint_dir
from distflow.util.files import PARTIAL, fsync, way_out, write_atomically
from distflow.util.patient_files import WholeFiles
from distflow.weights.state import RoleState

_DIGEST = struct.Struct("<Q32s")  # size and SHA-256 of a file; zeros if there is none
_FILES = "files.json"  # of a role, until the checkpoint is complete: its files besides tensors, with their checksums


@dataclass(frozen=True)
class _Part:
    """A copy of this worker's parts of a role's state, which the role may change in the meantime."""

    place: int  # of this worker among those of the role
    tensors: Mapping[str, Tensor]  # the parts that it owns, in host memory
    index: TensorIndex
    values: str  # JSON
    describe: Callable[[Path], None]


def _copy(role: str, state: RoleState, place: int) -> _Part:
    try:
        values = json.dumps(state.values)
    except (TypeError, ValueError, RecursionError) as e:
        raise CheckpointError(
            f"the state of the role '{role}' is not made of plain JSON values, and tensors beside them: {e}"
        ) from None
    index, tensors = TensorIndex.of(state), {}
    for name, part in index.owned(place).items():
        tensors[name] = state.tensors[name].detach().to("cpu", copy=True).contiguous()
        assert tensors[name].shape == torch.Size(hi - lo for lo, hi in part), name
    return _Part(place, tensors, index, values, state.describe)


Parts = Mapping[str, _Part]  # by role
_RATE = 50 << 20  # bytes a second with which a worker can write, at least: all workers may share one disk


def write_s(parts: Parts) -> float:
    """Returns how long it may take to write these parts."""
    return sum(t.nbytes for part in parts.values() for t in part.tensors.values()) / _RATE


class _ExportError(CheckpointError):
    """A checkpoint is complete, but for its export."""


class CheckpointWriter:
    """Writes the checkpoints of a run in a thread of its own. All workers call it alike.

    `roles` are the ranks that hold the state of each role, in the order of its layout. `run` carries out what the
    workers have to agree on; nothing else may use it at the same time.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        ranks: Sequence[int],
        roles: Mapping[str, Sequence[int]],
        run: Callable[[Communication[Any]], Any],
    ) -> None:
        self.folder, self.rank, self.ranks, self.roles = folder, rank, ranks, roles
        self._run = run
        self._files = WholeFiles()
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._running: Future[None] | None = None

    def copy(self, role_states: Mapping[str, RoleState]) -> Parts:
        """Copies this worker's parts of the state of its roles."""
        return {role: _copy(role, state, self.roles[role].index(self.rank)) for role, state in role_states.items()}

    def own_files(self, name: str, tensors: Mapping[str, Tensor], values: Any) -> Parts:
        """Returns a part of which every worker writes tensors of its own, which no index lists."""
        if self.rank not in self.roles.get(name, ()):
            return {}
        place = self.roles[name].index(self.rank)
        return {name: _Part(place, tensors, TensorIndex({}), json.dumps(values), lambda folder: None)}

    def save(
        self,
        step: int,
        parts: Parts,
        run_state: Mapping[str, Any],
        on_complete: Callable[[Path], None],
        export: Callable[[Path], object] | None = None,
    ) -> None:
        """Writes this worker's copies in the background; rank 0 then calls `on_complete` with the checkpoint.

        Before, rank 0 calls `export` with its folder, to write `huggingface` in it. Waits for the checkpoint before,
        and raises what went wrong with it.
        """
        self.wait()
        self._running = self._thread.submit(self._write, step, parts, dict(run_state), on_complete, export)

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
        parts: Parts,
        run_state: dict[str, Any],
        on_complete: Callable[[Path], None],
        export: Callable[[Path], object] | None,
    ) -> None:
        path, partial = checkpoint_dir(self.folder, step), self.folder / f"step_{step}{PARTIAL}"
        with self._stage(path, partial):
            if self.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
                with _writing(partial):
                    partial.mkdir(parents=True)
        digests = dict.fromkeys(self.roles, _DIGEST.pack(0, b""))
        with self._stage(path, partial):
            digests |= {role: _write_role(partial / role, part) for role, part in parts.items()}
            if self.rank == 0:
                _write_text(partial / RUN_STATE, json.dumps({"step": step, **run_state}))
                fsync(partial / RUN_STATE)
        row = torch.tensor(list(b"".join(digests.values())), dtype=torch.uint8)  # empty if no role has a state
        rows = self._run(all_gather(self.rank, self.ranks, row))
        with self._stage(path, partial):
            if self.rank == 0:
                problem = _export(partial, export) if export else None
                self._commit(partial, path, step, rows)
                on_complete(path)
                if problem:
                    raise _ExportError(f"its export failed: {problem}; the checkpoint itself is complete")

    @contextmanager
    def _stage(self, path: Path, partial: Path) -> Iterator[None]:
        """Waits until all workers have done their part; if one of them could not, raises on all."""
        error: BaseException | None = None
        try:
            yield
        except (OSError, ValueError, RuntimeError, SafetensorError, DistflowError) as e:
            error = e
        failed = self._run(all_reduce(self.rank, self.ranks, torch.tensor([error is not None]), torch.logical_or))
        if failed:
            own = ""
            if error:  # the room is that before the files that were written in vain are removed
                reason = f"could not be written: {short_reason(error)}; {way_out(self.folder, error)}"
                own = cut(str(error) if isinstance(error, _ExportError) else reason, 600)
            reasons = self._run(all_gather_bytes(self.rank, self.ranks, own.encode()))
            if self.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            raise CheckpointError(f"{path}: {next(filter(None, reasons)).decode()}") from error

    def _commit(self, partial: Path, path: Path, step: int, rows: Tensor) -> None:
        with _writing(partial / COMPLETE):
            write_atomically(partial / COMPLETE, file_list(step, self._listed(partial, rows)))
        fsync(partial)
        old = self.folder / f"step_{step}.old"
        shutil.rmtree(old, ignore_errors=True)
        if path.exists():
            path.rename(old)
        partial.rename(path)
        shutil.rmtree(old, ignore_errors=True)
        self._files.write(self.folder / LATEST, json.dumps({"step": step}))

    def _listed(self, partial: Path, rows: Tensor) -> dict[str, tuple[int, str]]:
        """Returns all files with their checksums. The rows of tensors are in `rows`, by worker and role."""
        exported = _files_in(partial / HUGGINGFACE) if (partial / HUGGINGFACE).exists() else []
        files = _checksums(partial, [partial / RUN_STATE, *exported])
        digests = {
            rank: list(_DIGEST.iter_unpack(bytes(row))) for rank, row in zip(self.ranks, rows.numpy(), strict=True)
        }
        for number, (role, ranks) in enumerate(self.roles.items()):
            for place, rank in enumerate(ranks):
                size, digest = digests[rank][number]
                if size:
                    files[f"{role}/{TENSORS}/{file_name(place)}"] = size, digest.hex()
            listing = partial / role / _FILES
            if listing.exists():
                files |= {
                    f"{role}/{name}": (size, digest) for name, (size, digest) in json.loads(listing.read_text()).items()
                }
                listing.unlink()
        return files


def _write_role(folder: Path, part: _Part) -> bytes:
    """Writes this worker's files of a role, and returns size and checksum of the one with its tensors."""
    digest = _DIGEST.pack(0, b"")
    tensors = folder / TENSORS
    with _writing(tensors):
        if part.tensors or part.place == 0:
            folder.mkdir(exist_ok=True)  # without parents: where the folder is not shared, there are none
        if part.tensors or (part.index.tensors and part.place == 0):
            tensors.mkdir(exist_ok=True)
    if part.tensors:
        file = tensors / file_name(part.place)
        with _writing(file):
            save_file(dict(part.tensors), file)
        digest = _DIGEST.pack(file.stat().st_size, bytes.fromhex(sha256(file)))
        fsync(file)
    if part.place == 0:
        _write_text(folder / VALUES, part.values)
        with _writing(folder):
            part.describe(folder)
        own = [file for entry in folder.iterdir() if entry.name != TENSORS for file in _files_in(entry)]
        if part.index.tensors:
            _write_text(tensors / INDEX, part.index.to_json())
            own.append(tensors / INDEX)
        _write_text(folder / _FILES, json.dumps(_checksums(folder, own)))
        for path in (*own, folder / _FILES, *{file.parent for file in own}):
            fsync(path)
    return digest


def _export(partial: Path, export: Callable[[Path], object]) -> str | None:
    """Exports into a checkpoint that is not complete yet. Returns why that failed; nothing of it is left then."""
    try:
        export(partial)
        for file in _files_in(partial / HUGGINGFACE):
            fsync(file)
    except Exception as e:  # of a model's own class: anything; the checkpoint is worth more
        shutil.rmtree(partial / HUGGINGFACE, ignore_errors=True)
        return short_reason(e)
    return None


@contextmanager
def _writing(file: Path) -> Iterator[None]:
    """Names the file in the error of a write, which may name none."""
    try:
        yield
    except (OSError, SafetensorError) as e:
        raise CheckpointError(f"{getattr(e, 'filename', None) or file}: {short_reason(e)}") from e


def _write_text(file: Path, text: str) -> None:
    with _writing(file):
        file.write_text(text)


def _files_in(path: Path) -> list[Path]:
    return [p for p in path.rglob("*") if p.is_file()] if path.is_dir() else [path]


def _checksums(folder: Path, files: Sequence[Path]) -> dict[str, tuple[int, str]]:
    return {str(file.relative_to(folder)): (file.stat().st_size, sha256(file)) for file in files}
