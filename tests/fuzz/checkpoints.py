"""Checkpoints that were whole once: no change goes unnoticed, none is loaded, and a run goes on from an older one."""

import contextlib
import hashlib
import io
import json
import shutil
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import torch

from distflow.launch import NEWEST
from distflow.run.checkpoint import (
    COMPLETE,
    STATE,
    TENSORS,
    Part,
    Saver,
    Team,
    damage,
    load_tensors,
    load_whole,
    place_of,
)
from distflow.run.checkpoint_manager import CheckpointManager
from fuzz.harness import Case
from fuzz.junk import damaged, junk, mutate

WEIGHTS = {"weights.a": torch.arange(12.0).reshape(3, 4), "weights.b": torch.ones(2, dtype=torch.int64)}


class Player:
    """Has something to keep."""

    def __init__(self) -> None:
        self.kept: Any = None

    def state(self) -> dict[str, Any]:
        return {"seen": 3}

    def restore(self, values: Any) -> None:
        self.kept = values


class Learner(Player):
    def part(self) -> Part:
        return Part({"updates": 1}, WEIGHTS)

    def restore(self, folder: Any, group: Any = None) -> None:
        into = {name: torch.zeros_like(t) for name, t in WEIGHTS.items()}
        load_tensors(folder, into, group)
        self.kept = into


class Checkpoints:
    name, quick, full = "checkpoints", 60, 3000

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "run" / "checkpoints"
        alone = Team((0,), None)
        saver = Saver(self.folder, 0, alone, {"actor": alone, "judge": alone})
        run = {"flow": "f", "seed": 0, "batch": 2, "repeat": 1}
        parts = {"actor": Learner().part(), "judge": Part({"seen": 3})}
        for step in (2, 4):
            saver.save(step, parts, {"position": 0, **run}, lambda p: None)
            saver.wait()
        saver.close()
        self.place = place_of(self.folder, 4)
        self.whole = {p: p.read_bytes() for p in sorted(self.place.rglob("*")) if p.is_file()}
        self.checkpoints = CheckpointManager.__new__(CheckpointManager)
        self.checkpoints.folder, self.checkpoints.rank, self.checkpoints.teams = (
            self.folder,
            0,
            {"actor": alone, "judge": alone},
        )
        self.checkpoints.network = SimpleNamespace(everybody=(0,), any_of_us=lambda it: it)  # type: ignore[assignment]
        self.checkpoints.players = {"actor": Learner(), "judge": Player()}
        self.checkpoints.data = SimpleNamespace(position=0)  # type: ignore[assignment]
        self.checkpoints._run = lambda: run  # type: ignore[method-assign]

    def close(self) -> None:
        pass

    def case(self, rng: Random, number: int) -> Case:
        self._mend()
        told, listed = self._break(rng, number)

        def run() -> None:
            wrong = damage(self.place)
            assert wrong is not None or not listed, f"unnoticed: {told}"
            assert wrong is None or str(self.place) in wrong, wrong
            with contextlib.redirect_stderr(io.StringIO()) as said, contextlib.redirect_stdout(io.StringIO()):
                step = self.checkpoints.resume(NEWEST)
            there = (self.place / COMPLETE).is_file()
            assert step == (2 if wrong or not there else 4), step
            assert not (wrong and there) or wrong in said.getvalue(), said.getvalue()
            if number % 3 == 0:
                self._load()

        return Case(told, run, (str(self.place / "actor"),), limit_s=30)

    def _load(self) -> None:
        """Whoever does not look for damage first is told, too, if it cannot be read."""
        found = load_whole(self.place / "actor", "weights.")
        assert all(isinstance(t, torch.Tensor) for t in found.values())

    def _mend(self) -> None:
        for path in self.whole:
            if path.is_dir():
                shutil.rmtree(path)
        for path in [p for p in self.place.rglob("*") if p.is_file() and p not in self.whole]:
            path.unlink()
        for path, data in self.whole.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)

    def _break(self, rng: Random, number: int) -> tuple[str, bool]:
        """What was done, and whether that must be noticed: the list of lists has no checksum but what it says."""
        paths = list(self.whole)
        path = rng.choice(paths)
        data, name = self.whole[path], str(path.relative_to(self.place))
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
                path.write_bytes(self.whole[other])
                return f"{name} is {other.name}", must and self.whole[other] != data
            case 6:
                path.unlink()
                path.mkdir()
                return f"{name} is a folder", must
            case 7 if path.suffix == ".json":
                doc = json.loads(data)
                mutate(doc, rng) if rng.random() < 0.7 else doc.update({"lists": junk(rng)})
                try:
                    text = json.dumps(doc, default=str)
                except (TypeError, ValueError):
                    text = "{}"
                path.write_text(text)
                return f"{name} says {text[:300]}", must and json.loads(data) != json.loads(text)
            case 7:
                path.write_bytes(data + b"\0")
                return f"{name} is longer", must
        lists = dict(json.loads(self.whole[self.place / COMPLETE])["lists"])
        whole = hashlib.sha256(self.whole[self.place / STATE]).hexdigest()
        lists |= rng.choice(
            ({STATE: "x"}, {STATE: whole}, {"../x": "y"}, {"": ""}, {"\x00": ""}, {"actor": ""}, {"sums.1.json": "z"})
        )
        (self.place / COMPLETE).write_text(json.dumps({"step": 4, "lists": lists}))
        return f"complete.json lists {lists}", True


def all_flips(kind: Checkpoints) -> int:
    """Every byte of every listed file, one bit each: the number of those that `damage` finds, or an error."""
    count = 0
    for path, data in kind.whole.items():
        if path.name == COMPLETE:
            continue
        for at in range(len(data)):
            path.write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])
            found = damage(kind.place)
            assert found is not None, f"{path}: byte {at}"
            assert str(path) in found
            count += 1
        path.write_bytes(data)
    assert damage(kind.place) is None
    assert (kind.place / "actor" / TENSORS).is_dir()
    return count
