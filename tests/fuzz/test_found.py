"""Problems that fuzzing has found, a test for each."""

import os
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml

from distflow import cli
from distflow.batch.batch import Ragged, as_column
from distflow.checkpoint.export import export
from distflow.checkpoint.store import file_list, list_checkpoints, load_tensors, verify
from distflow.cluster.launch_env import read_launch_env
from distflow.cluster.local import launch
from distflow.comm import wire
from distflow.config import Config, load_config
from distflow.config.schema import ModelConfig
from distflow.dataset.dataset import Dataset
from distflow.errors import CheckpointError, ConfigError, DataError, DistflowError, FlowError, PlacementError, shown
from distflow.flow import from_list
from distflow.model.prompt_check import texts
from distflow.model.source import find_folder, open_model
from distflow.model.text import Text
from distflow.reward.server import Scorer
from distflow.run.program import Program
from distflow.weights.state import RoleState
from fuzz.checkpoints import COUNTS, Checkpoints, Judge, all_flips
from fuzz.configs import CODE, bomb

WHERE = "field 'a'"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "own.py").write_text(CODE)
    (tmp_path / "rows.jsonl").write_text('{"text": "a", "label": 1}\n')
    return tmp_path


def load(folder: Path, text: str = "", **changed: Any) -> Config:
    config: dict[str, Any] = {"flow": "own.py:count", "data": {"files": "rows.jsonl", "batch": 4}, **changed}
    (folder / "run.yaml").write_text(yaml.safe_dump(config) + text)
    return load_config(folder / "run.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (bomb("list") + "\nsteps: *b11", "there are more than 20,000 values here once its aliases"),
        (bomb("map") + "\nsteps: *b59", "there are more than 20,000 values here once its aliases"),
        ("steps: &a [*a]", "an alias is used inside its own value"),
        ("steps: " + "[" * 1000, "nested too deeply"),
        ("steps: !!bool x", "does not fit its tag (KeyError"),
        ("steps: !!int ''", "does not fit its tag (IndexError"),
        ("steps: !!timestamp x", "does not fit its tag (AttributeError"),
        ("steps: 0x" + "f" * 5000, "the number 0xffff"),
        ("steps: [" + "1," * 30_000 + "]", "there are more than 20,000 values"),
        ("steps: 99999999999999999999", "the number 99999999999999999999 is too large"),
        ("wait_limit_s: .inf", "'wait_limit_s' is inf: input should be a finite number"),
        ("train: {lr: .nan}", "'train.lr' is nan: input should be a finite number"),
        ("\n".join(f"k{i}: 1" for i in range(50)), "; and 40 more"),
        ("x" * 1000 + ": 1", "xxx…'"),
        ("# " + "x" * (1 << 20), "has more than 1 MiB"),
        ('name: "\\ud800"', "has a lone surrogate"),
        ("wait_limit_s: 1e300", "'wait_limit_s' is 1e+300: input should be less than or equal to 1000000000"),
    ],
)
def test_a_config_that_is_too_much_is_refused(folder: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as e:
        load(folder, text)
    assert str(folder / "run.yaml") in str(e.value)
    assert len(str(e.value)) < 2000


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"workers": 10**12}, PlacementError, "workers: 1000000000000; at most 65,536 are supported"),
        ({"placement": {"ranks": {"g": "9" * 5000}}}, PlacementError, "placement.ranks.g: '999"),
        ({"algo": {"times": "x"}}, FlowError, "algo.times: 'x' is not an integer"),
        ({"data": {"files": "~nobody-here/x"}}, ConfigError, "data.files: '~nobody-here/x': there is no such user"),
        ({"data": {"files": "x" * 300}}, DataError, "cannot be looked up: [Errno 36] File name too long"),
        ({"data": {"files": "rows.jsonl", "rename": {"label": "text"}}}, ConfigError, "two columns are called 'text'"),
        ({"data": {"files": "rows.jsonl", "fields": ["text", "text"]}}, ConfigError, "two columns are called 'text'"),
        ({"flow": "exits.py:x"}, FlowError, "flow: 'exits.py:x' does not import: SystemExit: 3 ("),
        (
            {"flow": "own.py:measure", "roles": {"judge": "own.py:Judge"}, "algo": {"parts": 3}}
            | {"data": {"files": "rows.jsonl", "batch": 10**15}},
            ConfigError,
            "algo.mini_batches: 3 does not divide the 1000000000000000 prompts",
        ),
    ],
)
def test_a_config_that_cannot_be_planned_is_refused(
    folder: Path, changed: dict[str, Any], error: type[DistflowError], message: str
) -> None:
    (folder / "exits.py").write_text("raise SystemExit(3)")
    program = Program(load(folder, **changed))
    with pytest.raises(error, match=re.escape(message)):
        program.plan(program.config.workers or 1)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"params": {1: 2}}, "the name of constant 1 must be a string"),
        ({"params": {"any": {1: 2, "a": 3}}}, "constant 'any' is a dict; constants are plain JSON values"),
        ({"dynamic_sampling": -1}, "dynamic_sampling is -1; set a number"),
        ({"dynamic_sampling": True}, "dynamic_sampling is True; set a number"),
    ],
)
def test_a_node_of_a_list_is_refused_by_its_name(folder: Path, more: dict[str, Any], message: str) -> None:
    with pytest.raises(FlowError, match=f"^node 'a': .*{re.escape(message)}"):
        from_list("f", ["text"], [{"id": "a", "call": "own.py:anything", **more}], base=folder)


def test_a_pipe_is_refused_as_a_data_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.jsonl")
    with pytest.raises(DataError, match=r"a\.jsonl: is not a regular file"):
        Dataset([tmp_path], cache=tmp_path / "cache")


def test_parquet_that_python_cannot_say(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    days = pa.array([0, 2**50], pa.date64())
    pq.write_table(pa.table({"day": days}), path)
    rows = Dataset([path], cache=tmp_path / "cache")
    with pytest.raises(DataError, match=r"a\.parquet:2: the row cannot be read"):
        rows[1]
    assert len(Dataset([path], on_bad_row="skip", cache=tmp_path / "cache")) == 1
    pq.write_table(pa.Table.from_arrays([days, days], ["day", "day"]), path)
    with pytest.raises(DataError, match=r"a\.parquet: has two columns 'day'"):
        Dataset([path], cache=tmp_path / "cache")


def test_a_lone_surrogate_is_a_bad_prompt(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "x\\ud800"}\n')
    rows: Any = Dataset([tmp_path / "a.jsonl"], cache=tmp_path / "cache")
    source = open_model(ModelConfig(arch="qwen2", hidden=32, heads=2, vocab=300), lambda: texts(rows), tmp_path, 0)
    with pytest.raises(DataError, match=r"the prompt has a lone surrogate, '\\ud800', at 1"):
        Text(source, 10).encode(rows[0]["prompt"])
    with pytest.raises(DataError, match="a response is 3; it is text"):
        Text(source, 10).encode_pairs(["a"], [3])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("value", "numbers"),
    [
        (torch.tensor(2.0).expand(2), [2, 2]),
        (torch.arange(4.0)[::2], [0, 2]),
        (torch._neg_view(torch.ones(2)), [-1, -1]),
        (torch.conj(torch.tensor([1j, 2])), [-1j, 2]),
        (np.arange(4)[::-2], [3, 1]),
        (np.broadcast_to(np.float32(1), 2), [1, 1]),
        (np.arange(2, dtype=">i4"), [0, 1]),
    ],
)
def test_a_column_that_is_nowhere_in_memory_can_be_sent(value: Any, numbers: list[complex]) -> None:
    sent = wire.flatten(as_column(value, 2, WHERE), WHERE)
    assert sent.values.view(torch.uint8).view(sent.values.dtype).tolist() == numbers


def test_text_may_be_an_array() -> None:
    assert as_column(np.array(["a", "b"]), 2, WHERE) == ["a", "b"]


def _in_itself() -> list[Any]:
    made: list[Any] = []
    made.append(made)
    return made


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.eye(2).to_sparse(), "is a tensor without plain values in memory"),
        (torch.zeros(2, device="meta"), "is a tensor without plain values in memory"),
        (np.array(["2025-01-01"] * 2, "M8[D]"), r"has the NumPy dtype datetime64\[D\]"),
        (np.array("x"), "is a single number"),
        ([_in_itself(), 1], "sample 0 nests lists or dicts"),
        (
            Ragged(torch.zeros(3), np.array([0, 2]), np.array([2, 2])),
            "is a Ragged whose samples lie outside its values",
        ),
        (
            Ragged(torch.zeros(3), np.array([0, -1]), np.array([1, 1])),
            "is a Ragged whose samples lie outside its values",
        ),
        (Ragged(torch.zeros(3), [0, 1], [1, 1]), "is a Ragged whose samples lie outside its values"),  # type: ignore[arg-type]
        ([10**5000, 1], "cannot be sent: Exceeds the limit"),
    ],
)
def test_a_column_that_cannot_be_sent_is_refused(value: Any, message: str) -> None:
    with pytest.raises(DataError, match=f"^{WHERE}: {message}"):
        wire.flatten(as_column(value, 2, WHERE), WHERE)


@pytest.mark.parametrize("program", ["Odd()", "BadDict(score=1)", "Array()", "BadFloat(1)", "fail(BadError())"])
def test_a_score_that_fails_when_looked_at_costs_no_process(tmp_path: Path, program: str) -> None:
    from fuzz.rewards import FILE

    (tmp_path / "functions.py").write_text(FILE)
    scorer = Scorer([{"name": "r", "call": "functions.py:verl", "args": {}}], tmp_path)
    (result,) = scorer.results(0, {"data_source": "", "solution_str": program, "ground_truth": 1}, 1)
    assert re.match("(raised|returned) ", result.reason)  # type: ignore[union-attr]


def test_no_flip_of_a_bit_goes_unnoticed(tmp_path: Path) -> None:
    assert all_flips(Checkpoints(tmp_path)) > 1000


def test_a_role_of_the_evaluation_alone_is_in_no_checkpoint(tmp_path: Path) -> None:
    kind = Checkpoints(tmp_path)
    kind.manager.roles = {**kind.manager.roles, "reward": Judge()}
    assert kind.manager.resume(str(kind.path)) == 4
    assert kind.manager._role_states().keys() == {"actor", "judge"}


def test_a_checkpoint_may_have_been_given_another_name(tmp_path: Path) -> None:
    kind = Checkpoints(tmp_path)
    best = kind.path.rename(tmp_path / "the best")
    assert kind.manager.resume(str(best)) == 4
    judge = kind.manager.roles["judge"]
    assert isinstance(judge, Judge)
    restored = judge.restored
    assert restored["seen"] == 3
    assert torch.equal(restored["counts"], COUNTS)
    for name in ("step_²", "step_x", "step_9.part"):
        (kind.folder / name).mkdir()
        (kind.folder / name / "complete.json").write_text("{}")
    assert list_checkpoints(kind.folder) == [2]
    with pytest.raises(ConfigError, match="--resume: '~nobody-here' cannot be looked up"):
        kind.manager.resume("~nobody-here")


def test_a_checkpoint_with_an_empty_list_of_files_is_damaged(tmp_path: Path) -> None:
    kind = Checkpoints(tmp_path)
    (kind.path / "complete.json").write_text(file_list(4, {}))
    assert verify(kind.path) == f"{kind.path}: its list of files is not complete"


def test_tensors_of_another_shape_are_refused(tmp_path: Path) -> None:
    kind = Checkpoints(tmp_path)
    with pytest.raises(CheckpointError, match=r"actor/tensors: cannot be read: the tensor 'weights.a' has the"):
        load_tensors(kind.path / "actor", RoleState({}, {"weights.a": torch.zeros(5, 5)}), 0)


def test_an_export_needs_a_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Checkpoints(tmp_path).folder.parent
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file: cannot be written: File exists"):
        export(run, tmp_path / "file")
    with pytest.raises(SystemExit):
        cli.main(["export", str(run), str(tmp_path / "new"), "more"])
    assert "unknown argument more" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rank", "message"), [("x", "RANK in the environment is 'x'"), ("2", "RANK is 2 and WORLD_SIZE 2")]
)
def test_a_rank_that_is_not_possible_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, rank: str, message: str
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=message):
        read_launch_env()


@pytest.mark.parametrize("run_dir", ["run.yaml", "run.yaml/x", "\0", "x" * 300])
def test_a_run_needs_a_folder_of_its_own(folder: Path, run_dir: str) -> None:
    with pytest.raises(ConfigError, match=r"^run_dir: .* cannot be created: .*; choose another"):
        launch(load(folder, run_dir=str(folder / run_dir)), ["run", "run.yaml"])


@pytest.mark.parametrize("name", ["~nobody-here/x", "x" * 300])
def test_a_model_that_cannot_be_looked_up_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^model: '{name[:20]}.*' cannot be looked up"):
        find_folder(name, Path())


def test_anything_can_be_shown() -> None:
    assert shown(10**5000) == "a int"
    assert shown("x" * 100, 10) == "'xxxxxxxx…"
