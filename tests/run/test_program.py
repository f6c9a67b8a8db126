"""A config bound to code: its flow, roles, columns and plan."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from distflow.errors import ConfigError, DataError, DistflowError, FlowError
from distflow.plan import SyncWeights
from distflow.run.program import Program

ROOT = Path(__file__).parents[2]
FLOW = """
from distflow import flow, node

@node
def length(batch):
    return [len(t) for t in batch["text"]]

class Judge:
    def __init__(self, strict=False): ...
    def score(self, batch): ...

@flow
def measure(data, judge):
    judge.score(length(data["text"]))

@flow
def count(data):
    length(data["text"])
"""
MINIMAL: dict[str, Any] = {
    "flow": "own.py:count",
    "steps": 3,
    "data": {"files": "rows.jsonl", "batch": 4},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", [*sys.path])  # loading a file adds its folder
    (tmp_path / "own.py").write_text(FLOW)
    (tmp_path / "rows.jsonl").write_text('{"text": "a", "label": 1}\n')
    return tmp_path


def load(folder: Path, *overrides: str, **changes: Any) -> Program:
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(MINIMAL | changes))
    return Program.load(path, overrides)


def test_a_listed_flow_is_named_after_its_file(folder: Path) -> None:
    program = load(folder, flow=[{"id": "length", "call": "own.py:length", "reads": ["text"]}])
    assert (program.config.name, program.flow.name) == ("run", "run")
    assert program.flow.nodes == load(folder).flow.nodes


def test_paths_are_relative_to_the_folder_of_the_config(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    program = load(folder, flow="own.py:measure", roles={"judge": "own.py:Judge"})
    assert program.files == [str(folder / "rows.jsonl")]
    assert program.flow.source == ("text", "label")
    assert [n.id for n in program.flow.nodes] == ["length", "judge.score"]
    absolute = str(folder / "rows.jsonl")
    assert load(folder, f"data.files={absolute}").files == [absolute]


def test_a_path_may_start_at_home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder / "home"))
    (folder / "home").mkdir()
    (folder / "home" / "mine.jsonl").write_text('{"text": "a"}\n')
    assert load(folder, "data.files=~/mine.jsonl").flow.source == ("text",)


def test_columns_are_those_of_the_first_row_unless_named(folder: Path) -> None:
    assert load(folder).flow.source == ("text", "label")
    assert load(folder, "data.fields=[text]").flow.source == ("text",)
    with pytest.raises(FlowError, match="the data has no column 'text'; did you mean 'texts'"):
        _ = load(folder, "data.fields=[texts]").flow


def test_a_bad_first_row_is_skipped_when_bad_rows_are(folder: Path) -> None:
    (folder / "bad.jsonl").write_text('oops\n{"text": "a"}\n')
    assert load(folder, "data.files=bad.jsonl", "data.on_bad_row=skip").flow.source == ("text",)
    with pytest.raises(DataError, match=r"bad\.jsonl"):
        _ = load(folder, "data.files=bad.jsonl").flow


def test_without_a_rollout_a_prompt_has_one_sample(folder: Path) -> None:
    assert load(folder).repeat == 1
    assert load(folder, "data.repeat=3").repeat == 3


def test_a_role_is_implemented_by_what_the_config_names(folder: Path) -> None:
    assert load(folder, roles={"judge": {"call": "own.py:Judge"}}).implementation("judge").__name__ == "Judge"
    with pytest.raises(FlowError, match=re.escape("roles.judge: 'own.py:Jugde' has no 'Jugde'; did you mean 'Judge'?")):
        load(folder, roles={"judge": "own.py:Jugde"}).implementation("judge")


def test_bytes_of_an_unknown_field_are_refused_with_a_suggestion(folder: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape("bytes: there is no field 'lenght'; did you mean 'length'?")):
        load(folder, bytes={"lenght": 8}).plan(1)
    assert load(folder, bytes={"length": 8, "label": 8}).plan(1)  # no node reads the label


def test_a_role_that_a_listed_flow_does_not_use_is_refused(folder: Path) -> None:
    with pytest.raises(FlowError, match="flow 'run': no node calls the role 'jugde'; remove it or call it"):
        load(folder, flow=[{"id": "a", "call": "own.py:length"}], roles={"jugde": "own.py:Judge"}).plan(1)


def test_the_plan_is_the_same_wherever_its_files_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    roles = {"judge": "own.py:Judge"}
    plans = []
    for name in ("one", "two/three"):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / "own.py").write_text(FLOW)
        (folder / "rows.jsonl").write_text('{"text": "a"}\n')
        plans.append(load(folder, flow="own.py:measure", roles=roles).plan(1))
    first, second = plans
    assert [n["call"] for n in first.to_json()["nodes"][1:]] == ["own.py:length", "own.py:Judge.score"]
    assert first.to_json() == second.to_json()
    assert first.hash == second.hash
    other = load(tmp_path / "one", flow="own.py:count").plan(1)
    assert other.hash != first.hash


@pytest.mark.parametrize(
    ("flow", "message"),
    [
        ("own.py:length", "flow: 'own.py:length' is a function; mark the function with @flow"),
        ("own.py:cuont", "flow: 'own.py:cuont' has no 'cuont'; did you mean 'count'?"),
        ("nowhere.py:count", "flow: 'nowhere.py:count' does not import: there is no file"),
        ("grop", "flow: there is no built-in flow 'grop'; did you mean 'grpo'?"),
    ],
)
def test_a_flow_that_does_not_exist_is_refused(folder: Path, flow: str, message: str) -> None:
    with pytest.raises(DistflowError, match=re.escape(message)):
        _ = load(folder, flow=flow).flow


def examples() -> list[Path]:
    return sorted(p for p in (ROOT / "examples").rglob("*.yaml") if p.parent.name != "clusters")


def test_there_are_examples() -> None:
    assert len(examples()) >= 2


@pytest.mark.parametrize("path", examples(), ids=lambda p: str(p.relative_to(ROOT)))
def test_every_example_config_parses_and_plans(path: Path) -> None:
    program = Program.load(path)
    config = program.config
    if not all(Path(f).exists() for f in program.files):  # written by a script of the example
        given = config.flow == "sft" or config.algo.get("samples") == "given"
        program = Program.load(path, [f"data.fields=[prompt, {'response' if given else 'answer'}]"])
    plan = program.plan(config.workers or 1)
    assert {n.id for n in program.flow.nodes} <= set(plan.home)
    assert json.loads(json.dumps(plan.to_json()))["samples"] == config.data.batch * program.repeat


def test_expected_bytes_follow_from_the_model_and_the_longest_response(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "x"}) + "\n")
    config = {
        "flow": "grpo",
        "data": {"files": "rows.jsonl", "max_prompt": 100},
        "model": {"arch": "qwen2", "hidden": 64, "layers": 2, "vocab": 300},
        "rollout": {"max_tokens": 2000},
        "reward": "reward.py:f",
        "bytes": {"rollout_logprobs": 7},
    }
    path = tmp_path / "grpo.yaml"
    path.write_text(yaml.safe_dump(config))
    plan = Program.load(path).plan(2)
    assert plan.bytes["response_tokens"] == 8 * 1000  # half of what is allowed
    assert plan.bytes["prompt_tokens"] == 8 * 100
    assert plan.bytes["rollout_logprobs"] == 7
    parameters = 300 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 256 + 2 * 64) + 64
    (task,) = (t for t in plan.tasks if isinstance(t, SyncWeights))
    assert task.expected_bytes == 4 * parameters  # two ranks need a copy each and have a half of one each


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ({"partial": True}, r"rollout\.partial: .* rollout\.staleness is 0; make it 1 or more"),
        ({"partial": 0, "staleness": 1}, r"rollout\.partial.* give a number of prompts above 0, or true"),
        ({"partial": "some", "staleness": 1}, r"rollout\.partial.* give a number of prompts above 0"),
        ({"staleness": 1, "chunk": 3}, r"rollout\.chunk: chunks of 3 do not divide the 4 prompts"),
    ],
)
def test_rollouts_that_cannot_be_are_refused_before_anything_is_loaded(
    tmp_path: Path, rollout: dict[str, Any], message: str
) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "a"}) + "\n")
    (tmp_path / "reward.py").write_text("def score(solution_str): return 0.0\n")
    config = {
        "flow": "grpo",
        "data": {"files": "rows.jsonl", "batch": 4},
        "model": {"arch": "qwen2", "hidden": 64},
        "reward": "reward.py:score",
        "rollout": rollout,
        "placement": {
            "ranks": {"rollout": "0-1", "train": "2"},
            "default": {"ranks": "train"},
            "nodes": {"actor.generate": {"ranks": "rollout"}},
        },
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    with pytest.raises(DistflowError, match=message):
        Program.load(path).plan(3)
