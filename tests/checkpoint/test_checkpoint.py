"""Checkpoints by N workers, here threads: any layout reads what another wrote, and it is complete or absent."""

import json
import os
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from distflow.checkpoint import shared_folder
from distflow.checkpoint import store as checkpoint
from distflow.checkpoint import writer as checkpoint_writer
from distflow.checkpoint.shared_folder import check_shared
from distflow.checkpoint.store import (
    _share,
    list_checkpoints,
    load_full_tensors,
    load_tensors,
    read_values,
    sha256,
    verify,
)
from distflow.checkpoint.writer import CheckpointWriter
from distflow.errors import CheckpointError, ConfigError
from distflow.plan.layout import Layout
from distflow.run_folder import HUGGINGFACE, checkpoint_dir
from distflow.weights.shards import Shards, TensorSpec, slices
from distflow.weights.state import RoleState
from threads import Run, alone, on_ranks

SPECS = [
    TensorSpec("rows", (10, 3), 0),
    TensorSpec("columns", (7, 8), 1),
    TensorSpec("norm", (9,)),
    TensorSpec("one", (1, 5)),
    TensorSpec("bias", (4,), 0),
]
WHOLE = {
    "rows": torch.arange(30.0).view(10, 3),
    "columns": torch.arange(56.0).view(7, 8).bfloat16(),
    "norm": torch.arange(9.0),
    "one": torch.rand(1, 5),
    "bias": torch.arange(4),
    "scalar": torch.tensor(3.0),  # these are not cut
    "plain": torch.arange(6).view(2, 3),
}
SIZES = {  # dp, tp, shard
    "one": (1, 1, 1),
    "dp4": (4, 1, 4),
    "dp3": (3, 1, 3),
    "dp2·tp2": (2, 2, 2),
    "tp2": (1, 2, 1),
    "hybrid": (4, 2, 2),
    "replicas": (4, 1, 1),
}
LAYOUTS = {name: Shards(Layout(tuple(range(dp * tp)), dp, tp), shard) for name, (dp, tp, shard) in SIZES.items()}


def state_of(shards: Shards, rank: int, whole: dict[str, Tensor] = WHOLE) -> RoleState:
    tensors = {s.name: whole[s.name][slices(shards.box(s, rank))].clone() for s in SPECS}
    tensors |= {name: whole[name].clone() for name in ("scalar", "plain")}
    return RoleState({"updates": 3}, tensors, {s.name: s for s in SPECS}, shards)


def write(
    folder: Path,
    shards: Shards,
    on_complete: Callable[[Path], None] = lambda path: None,
    steps: tuple[int, ...] = (1,),
    export: Callable[[Path], None] | None = None,
) -> list[Any]:
    def worker(rank: int, run: Run) -> None:
        ranks = shards.layout.ranks
        writer = CheckpointWriter(folder, rank, ranks, {"actor": ranks, "judge": ranks[-1:], "none": ranks}, run)
        states = {"actor": state_of(shards, rank)} | ({"judge": RoleState([1, 2])} if rank == ranks[-1] else {})
        for step in steps:
            writer.save(step, writer.copy(states), {"position": 0}, on_complete, export)
        try:
            writer.wait()
        finally:
            writer.close()

    return on_ranks(len(shards.layout.ranks), worker)


@pytest.mark.parametrize("written", LAYOUTS)
def test_every_layout_reads_what_another_wrote(tmp_path: Path, written: str) -> None:
    assert not any(write(tmp_path, LAYOUTS[written]))
    folder = checkpoint_dir(tmp_path, 1) / "actor"
    assert verify(folder.parent) is None
    for shards in LAYOUTS.values():
        for rank in shards.layout.ranks:
            state = state_of(shards, rank, {name: torch.zeros_like(t) for name, t in WHOLE.items()})
            load_tensors(folder, state, rank)
            for name, tensor in state_of(shards, rank).tensors.items():
                assert torch.equal(state.tensors[name], tensor), (name, rank)
    full = load_full_tensors(folder)
    assert {name: t.dtype for name, t in full.items()} == {name: t.dtype for name, t in WHOLE.items()}
    assert all(torch.equal(full[name], t) for name, t in WHOLE.items())
    assert load_full_tensors(folder, "col").keys() == {"umns"}
    assert read_values(folder) == {"updates": 3}
    assert read_values(folder.parent / "judge") == [1, 2]
    assert load_full_tensors(folder.parent / "judge") == {}
    assert not (folder.parent / "none").exists()


@pytest.mark.parametrize(("layout", "files"), [("replicas", 4), ("hybrid", 8), ("tp2", 2), ("one", 1)])
def test_every_file_is_listed_and_nothing_is_written_twice(tmp_path: Path, layout: str, files: int) -> None:
    write(tmp_path, LAYOUTS[layout])
    path = checkpoint_dir(tmp_path, 1)
    found = {str(p.relative_to(path)) for p in path.rglob("*") if p.is_file()}
    assert found == {*json.loads((path / "complete.json").read_text())["files"], "complete.json"}
    tensors = list((path / "actor" / "tensors").glob("*.safetensors"))
    assert 1 <= len(tensors) <= files
    size = sum(t.numel() * t.itemsize for t in WHOLE.values())
    headers = sum(8 + int.from_bytes(p.read_bytes()[:8], "little") for p in tensors)
    assert sum(p.stat().st_size for p in tensors) == size + headers


@given(st.integers(1, 12), st.data())
@settings(max_examples=30, deadline=None)
def test_the_shares_of_a_check_are_the_whole(shares: int, data: st.DataObject) -> None:
    places = data.draw(st.integers(0, 30))
    names = ["state.json", "actor/values.json", *(f"actor/tensors/{i:05}.safetensors" for i in range(places))]
    of_workers = [_share(names, share, shares) for share in range(shares)]
    assert sorted(n for part in of_workers for n in part) == sorted(names)
    assert max(map(len, of_workers)) <= places / shares + 3


def test_a_check_reads_its_share_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, LAYOUTS["dp4"])
    path = checkpoint_dir(tmp_path, 1)
    read: list[str] = []

    def counted(file: Path) -> str:
        read.append(file.name)
        return sha256(file)

    monkeypatch.setattr(checkpoint, "sha256", counted)
    counts = []
    for share in range(4):
        read.clear()
        assert verify(path, share, 4) is None
        assert f"{share:05}.safetensors" in read  # the one that it reads next
        counts.append(len(read))
    assert sum(counts) == len(json.loads((path / "complete.json").read_text())["files"])


@pytest.mark.parametrize(
    ("readable", "damage"),
    [
        (False, lambda p: (p / "actor/tensors/00002.safetensors").unlink()),
        (False, lambda p: os.truncate(p / "actor/tensors/00002.safetensors", 200)),
        (
            True,
            lambda p: (p / "actor/tensors/00002.safetensors").write_bytes(
                (p / "actor/tensors/00001.safetensors").read_bytes()
            ),
        ),
        (False, lambda p: (p / "actor/tensors/index.json").write_text("[" * 100_000)),
        (False, lambda p: (p / "actor/tensors/index.json").unlink()),
        (True, lambda p: (p / "complete.json").write_text((p / "complete.json").read_text().replace("2", "3"))),
        (True, lambda p: (p / "complete.json").write_text('{"format": 3, "step": 1, "files": {}}')),
    ],
)
def test_damage_is_found_by_one_worker_and_reading_fails_clearly(
    tmp_path: Path, readable: bool, damage: Callable[[Path], Any]
) -> None:
    write(tmp_path, LAYOUTS["dp4"])
    path = checkpoint_dir(tmp_path, 1)
    damage(path)
    problems = [verify(path, share, 4) for share in range(4)]
    assert any(problems)
    assert all(str(path) in p for p in problems if p)
    refused = pytest.raises(CheckpointError, match=r"/actor/tensors: cannot be read: .*; use another checkpoint")
    with nullcontext() if readable else refused:
        load_full_tensors(path / "actor")


def test_a_model_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    write(tmp_path, LAYOUTS["one"])
    folder = checkpoint_dir(tmp_path, 1) / "actor"
    with pytest.raises(CheckpointError, match=r"the tensor 'plain' has the shape .2, 3., and should have .3, 2."):
        load_tensors(folder, RoleState({}, {"plain": torch.zeros(3, 2)}), 0)
    with pytest.raises(CheckpointError, match="there is no tensor 'other'"):
        load_tensors(folder, RoleState({}, {"other": torch.zeros(3, 2)}), 0)


def test_if_one_worker_cannot_write_there_is_no_checkpoint_on_any(tmp_path: Path, monkeypatch: Any) -> None:
    write(tmp_path, LAYOUTS["dp4"])

    def full(tensors: Any, file: Path) -> None:
        if file.name == "00002.safetensors":
            raise OSError(28, "No space left on device")
        save_file(tensors, file)

    monkeypatch.setattr(checkpoint_writer, "save_file", full)
    errors = write(tmp_path, LAYOUTS["dp4"], steps=(2,))
    assert all(isinstance(e, CheckpointError) for e in errors)
    file = tmp_path / "step_2.part" / "actor" / "tensors" / "00002.safetensors"
    for error in errors:  # all say what one has seen
        assert re.fullmatch(
            rf"{tmp_path}/step_2: could not be written: {file}: No space left on device;"
            rf" make room in {tmp_path}, where \S+ \wi?B are free",
            str(error),
        )
    assert list_checkpoints(tmp_path) == [1]
    assert [p.name for p in tmp_path.glob("step_*")] == ["step_1"]
    monkeypatch.undo()
    done: list[Path] = []
    assert not any(write(tmp_path, LAYOUTS["dp4"], done.append, (2, 1)))
    assert [p.name for p in done] == ["step_2", "step_1"]
    assert json.loads((tmp_path / "latest").read_text()) == {"step": 1}


def test_an_export_is_listed_and_a_damaged_one_does_not_stop_a_resume(tmp_path: Path) -> None:
    def export(path: Path) -> None:
        assert not (path / "complete.json").exists()
        assert list((path / "actor" / "tensors").glob("*.safetensors"))  # it can be read from there
        (path / HUGGINGFACE).mkdir()
        (path / HUGGINGFACE / "model.safetensors").write_bytes(b"weights")

    assert not any(write(tmp_path, LAYOUTS["dp4"], export=export))
    path = checkpoint_dir(tmp_path, 1)
    assert f"{HUGGINGFACE}/model.safetensors" in json.loads((path / "complete.json").read_text())["files"]
    (path / HUGGINGFACE / "model.safetensors").write_bytes(b"weighty")
    assert verify(path) == f"{path}/{HUGGINGFACE}/model.safetensors has changed since it was written"
    assert verify(path, kind="export") == verify(path)
    assert verify(path, kind="state") is None
    assert verify(path, 0, 3) is None or verify(path, 1, 3) is None  # one worker finds it


def test_an_export_that_fails_costs_no_checkpoint(tmp_path: Path) -> None:
    def export(path: Path) -> None:
        (path / HUGGINGFACE).mkdir()
        (path / HUGGINGFACE / "model.safetensors").write_bytes(b"wei")
        raise OSError(28, "No space left on device")

    errors = write(tmp_path, LAYOUTS["dp4"], export=export)
    path = checkpoint_dir(tmp_path, 1)
    text = f"{path}: its export failed: No space left on device; the checkpoint itself is complete"
    assert [str(e) for e in errors] == [text] * 4
    assert verify(path) is None
    assert not (path / HUGGINGFACE).exists()


def test_what_is_saved_is_the_state_at_that_moment(tmp_path: Path) -> None:
    values, tensor = {"seen": 1}, torch.zeros(3)
    state = RoleState.of({"counts": tensor, **values, "list": (seen := [1])}, "judge")
    writer = CheckpointWriter(tmp_path, 0, (0,), {"judge": (0,)}, alone)
    writer.save(1, writer.copy({"judge": state}), {}, lambda path: None)
    tensor += 1
    seen.append(2)
    writer.wait()
    writer.close()
    folder = checkpoint_dir(tmp_path, 1) / "judge"
    assert read_values(folder) == {"seen": 1, "list": [1]}
    assert load_full_tensors(folder)["counts"].tolist() == [0, 0, 0]


def test_a_state_that_cannot_be_saved_is_refused_with_its_role(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, 0, (0,), {"judge": (0,)}, alone)
    for values in ({"seen": {1, 2}}, {"inner": {"tensor": torch.zeros(2)}}):
        with pytest.raises(CheckpointError, match="the state of the role 'judge' is not made of plain JSON values"):
            writer.save(1, writer.copy({"judge": RoleState.of(values, "judge")}), {}, lambda path: None)
    with pytest.raises(
        CheckpointError, match=r"role 'judge': state.. returns a tensor 3 that is sharded or has no name"
    ):
        RoleState.of({3: torch.zeros(2)}, "judge")
    state = RoleState({}, {"a": torch.zeros(2, dtype=torch.complex128)})
    with pytest.raises(CheckpointError, match=r"the tensor 'a' is torch[.]complex128, which cannot be saved"):
        writer.save(1, writer.copy({"judge": state}), {}, lambda path: None)
    writer.close()


def test_hosts_without_a_common_folder_are_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_folder, "_LAG_S", 0.1)
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()

    def worker(rank: int, run: Run) -> None:
        check_shared(folders[rank // 2], rank, range(4), run)

    errors = on_ranks(4, worker)
    assert all(isinstance(e, ConfigError) for e in errors)
    for rank, error in enumerate(errors):
        assert re.fullmatch(
            rf"run_dir: {folders[rank // 2]}: rank 2-3 on host \S+ does not see what rank 0 writes there;"
            " checkpoints need a folder that all hosts share: set run_dir to one",
            str(error),
        )
    folders[1] = folders[0]
    assert on_ranks(4, worker) == [None] * 4
    assert not any(folders[0].iterdir())
    folders[:] = [tmp_path / "gone"] * 2
    assert "rank 0 on host" in str(on_ranks(4, worker)[3])
