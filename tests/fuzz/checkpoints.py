"""Damaged checkpoints: every change is noticed, none is loaded, and a run resumes from an older one."""

import io
import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distflow.checkpoint.store import (
    INDEX,
    RUN_STATE,
    TENSORS,
    file_list,
    format_problem,
    load_full_tensors,
    sha256,
    verify,
)
from distflow.checkpoint.writer import CheckpointWriter
from distflow.dataset.dataset import Dataset
from distflow.dataset.fingerprint import fingerprint
from distflow.dataset.loader import Loader
from distflow.dataset.view import DatasetView
from distflow.errors import ConfigError
from distflow.roles.role import Role
from distflow.run.checkpoint_manager import CheckpointManager
from distflow.run_folder import COMPLETE, NEWEST, checkpoint_dir
from distflow.weights.state import RoleState
from fuzz.harness import Case
from fuzz.junk import damaged, junk, mutate
from threads import alone

COUNTS = torch.arange(5, dtype=torch.int16)
WEIGHTS = {"weights.a": torch.arange(12.0).reshape(3, 4), "weights.b": torch.ones(2, dtype=torch.int64)}


class Judge(Role):
    """A user's role with a state."""

    def __init__(self) -> None:
        self.restored: Any = None

    def state(self) -> dict[str, Any]:
        return {"seen": 3, "counts": COUNTS}

    def restore(self, state: Any) -> None:
        self.restored = state


class Actor(Role):
    """A role with tensors, of which a rank may have parts."""

    def __init__(self) -> None:
        self.tensors = {name: t.clone() for name, t in WEIGHTS.items()}

    def state(self) -> RoleState:
        return RoleState({"updates": 1}, self.tensors)

    def restore(self, state: Any) -> None:
        self.tensors = {name: torch.zeros_like(t) for name, t in WEIGHTS.items()}


class Checkpoints:
    name, quick, full = "checkpoints", 60, 3000

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "run" / "checkpoints"
        ranks = {"actor": (0,), "judge": (0,)}
        writer = CheckpointWriter(self.folder, 0, (0,), ranks, alone)
        identity = {"flow": "f", "seed": 0, "batch": 2, "repeat": 1}
        (folder / "rows.jsonl").write_text('{"prompt": "p"}\n' * 10)
        rows = DatasetView(Dataset([folder / "rows.jsonl"], cache=folder), {})
        loader = Loader(rows, 2, 1, seed=0)
        data = {"eras": loader.eras, **fingerprint(rows)}
        states = {"actor": Actor().state(), "judge": RoleState.of(Judge().state(), "judge")}
        for step in (2, 4):
            writer.save(step, writer.copy(states), {"position": 0, "data": data, **identity}, lambda path: None)
            writer.wait()
        writer.close()
        self.path = checkpoint_dir(self.folder, 4)
        self.files = {p: p.read_bytes() for p in sorted(self.path.rglob("*")) if p.is_file()}
        self.manager = CheckpointManager.__new__(CheckpointManager)
        self.manager.folder, self.manager.rank, self.manager.ranks = self.folder, 0, ranks  # type: ignore[assignment]
        self.manager.config = SimpleNamespace(run_folder=folder / "run", model=None)  # type: ignore[assignment]
        self.manager.world = SimpleNamespace(  # type: ignore[assignment]
            all_ranks=(0,),
            any_rank=lambda value: value,
            transport=SimpleNamespace(run=alone),
            identities=(),
            device=torch.device("cpu"),
        )
        self.manager.rows = rows
        self.manager.roles = {"actor": Actor(), "judge": Judge()}
        unplanned = SimpleNamespace(prompts_ahead=0, staleness=0, tasks=())
        self.manager.data = SimpleNamespace(position=0, loader=loader, plan=unplanned)  # type: ignore[assignment]
        self.manager._identity = lambda: identity  # type: ignore[method-assign]

    def close(self) -> None:
        pass

    def case(self, rng: Random, number: int) -> Case:
        self._repair()
        if number % 4 == 3:
            return Case(self._forge(rng), self._resume_forged, (str(self.path),), limit_s=30)
        change, must_be_noticed = self._damage(rng)

        def run() -> None:
            problem = format_problem(self.path) or verify(self.path)
            assert problem is not None or not must_be_noticed, f"unnoticed: {change}"
            assert problem is None or str(self.path) in problem, problem
            with _logged() as log:
                step = self.manager.resume(NEWEST)
            listed = (self.path / COMPLETE).is_file()
            assert step == (2 if problem or not listed else 4), step
            assert not (problem and listed) or problem in log.getvalue(), log.getvalue()
            if format_problem(self.path):
                self._resume_from_it_alone()
            if number % 3 == 0:
                self._load()

        return Case(change, run, (str(self.path / "actor"),), limit_s=30)

    def _resume_from_it_alone(self) -> None:
        with pytest.raises(ConfigError, match=f"^--resume: {self.path} was written by another version"):
            self.manager.resume(str(self.path))

    def _load(self) -> None:
        """Loading without `verify` also fails with an error that names the folder, if it fails."""
        tensors = load_full_tensors(self.path / "actor", "weights.")
        assert all(isinstance(t, torch.Tensor) for t in tensors.values())

    def _repair(self) -> None:
        for path in self.files:
            if path.is_dir():
                shutil.rmtree(path)
        for path in [p for p in self.path.rglob("*") if p.is_file() and p not in self.files]:
            path.unlink()
        for path, data in self.files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)

    def _damage(self, rng: Random) -> tuple[str, bool]:
        """Returns what was changed, and whether that must be noticed: complete.json has no checksum of its own."""
        paths = list(self.files)
        path = rng.choice(paths)
        data, name = self.files[path], str(path.relative_to(self.path))
        must = path.name != COMPLETE
        match rng.randrange(9):
            case 0 | 1 | 2:
                at, bit = rng.randrange(len(data)), rng.randrange(8)
                path.write_bytes(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :])
                return f"{name}: bit {bit} of byte {at} flipped", must
            case 3:
                changed = damaged(data, rng)
                path.write_bytes(changed)
                return f"{name} is {changed[:200]!r}", must and changed != data
            case 4:
                path.unlink()
                return f"{name} deleted", must
            case 5:
                other = rng.choice(paths)
                path.write_bytes(self.files[other])
                return f"{name} is {other.name}", must and self.files[other] != data
            case 6:
                path.unlink()
                path.mkdir()
                return f"{name} is a folder", must
            case 7 if path.suffix == ".json":
                doc = json.loads(data)
                mutate(doc, rng) if rng.random() < 0.7 else doc.update({"files": junk(rng)})
                text = _to_json(doc)
                path.write_text(text)
                return f"{name} says {text[:300]}", must and json.loads(data) != json.loads(text)
            case 7:
                path.write_bytes(data + b"\0")
                return f"{name} is longer", must
        complete = json.loads(self.files[self.path / COMPLETE])
        size, state = complete["files"][RUN_STATE]
        complete["files"] |= rng.choice(
            (
                {RUN_STATE: [size, "x"]},
                {RUN_STATE: [size + 1, state]},
                {RUN_STATE: state},
                {"../x": [1, "y"]},
                {"": [0, ""]},
                {"\x00": [0, ""]},
                {"actor": [4096, ""]},
                {"actor/tensors/00001.safetensors": [4, "z"]},
            )
        )
        if rng.random() < 0.5:
            (self.path / COMPLETE).write_text(json.dumps(complete))
        else:
            (self.path / COMPLETE).write_text(file_list(4, complete["files"]))
        return f"complete.json lists {complete['files']}", True

    def _forge(self, rng: Random) -> str:
        """Changes a file and the list of files with it, so that only a reader can notice."""
        path = rng.choice([p for p in self.files if p.name in (INDEX, RUN_STATE) or p.suffix == ".safetensors"])
        data = self.files[path]
        if path.suffix == ".json" and rng.random() < 0.7:
            doc = json.loads(data)
            mutate(doc["tensors"] if path.name == INDEX and rng.random() < 0.7 else doc, rng)
            data = _to_json(doc).encode()
        else:
            data = damaged(data, rng)
        path.write_bytes(data)
        files = json.loads(self.files[self.path / COMPLETE])["files"]
        files[str(path.relative_to(self.path))] = (len(data), sha256(path))
        (self.path / COMPLETE).write_text(file_list(4, files))
        return f"{path.name} is forged: {data[:300]!r}"

    def _resume_forged(self) -> None:
        assert verify(self.path) is None
        with _logged():
            self.manager.resume(NEWEST)
        self._load()


def _to_json(doc: Any) -> str:
    try:
        return json.dumps(doc, default=str)
    except (TypeError, ValueError):
        return "{}"


def all_flips(kind: Checkpoints) -> int:
    """Flips a bit in every byte of every file, and returns how many there were; `verify` must find them all."""
    count = 0
    for path, data in kind.files.items():
        name = path.parent if path.name == COMPLETE else path
        for at in range(len(data)):
            path.write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])
            problem = verify(kind.path)
            assert problem is not None, f"{path}: byte {at}"
            assert str(name) in problem
            count += 1
        path.write_bytes(data)
    assert verify(kind.path) is None
    assert (kind.path / "actor" / TENSORS).is_dir()
    return count


@contextmanager
def _logged() -> Iterator[io.StringIO]:
    """Collects what the package logs, and keeps it from the terminal."""
    log, package = io.StringIO(), logging.getLogger("distflow")
    before, package.handlers = package.handlers, [logging.StreamHandler(log)]
    propagate, package.propagate = package.propagate, False
    try:
        yield log
    finally:
        package.handlers, package.propagate = before, propagate
