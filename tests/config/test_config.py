import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from distflow.config import Config, load_config
from distflow.config.schema import RoleConfig
from distflow.errors import ConfigError, DataError, DistflowError, FlowError

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


def read(folder: Path, *overrides: str, **changed: Any) -> Config:
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(MINIMAL | changed))
    return load_config(path, overrides)


def test_what_is_not_said_has_a_default(folder: Path) -> None:
    c = read(folder)
    assert (c.name, c.workers, c.seed, c.repeat, c.data.on_bad_row) == ("count", None, 0, 1, "error")
    assert c.run_folder == Path("runs/count")
    assert read(folder, "run_dir=/x/y").run_folder == Path("/x/y")
    assert read(folder, "name=mine").run_folder == Path("runs/mine")


def test_a_listed_flow_is_called_like_its_file(folder: Path) -> None:
    c = read(folder, flow=[{"id": "length", "call": "own.py:length", "reads": ["text"]}])
    assert (c.name, c.graph.name) == ("run", "run")
    assert c.graph.nodes == read(folder).graph.nodes


def test_paths_are_looked_up_from_the_folder_of_the_config(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    c = read(folder, flow="own.py:measure", roles={"judge": "own.py:Judge"})
    assert c.files == [str(folder / "rows.jsonl")]
    assert c.graph.source == ("text", "label")
    assert [n.id for n in c.graph.nodes] == ["length", "judge.score"]
    absolute = str(folder / "rows.jsonl")
    assert read(folder, f"data.files={absolute}").files == [absolute]


def test_a_path_may_start_at_home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder / "home"))
    (folder / "home").mkdir()
    (folder / "home" / "mine.jsonl").write_text('{"text": "a"}\n')
    assert read(folder, "data.files=~/mine.jsonl").graph.source == ("text",)


def test_columns_are_those_of_the_first_row_unless_named(folder: Path) -> None:
    assert read(folder).graph.source == ("text", "label")
    assert read(folder, "data.fields=[text]").graph.source == ("text",)
    with pytest.raises(FlowError, match="the data has no column 'text'; did you mean 'texts'"):
        _ = read(folder, "data.fields=[texts]").graph


def test_a_bad_first_row_is_skipped_when_bad_rows_are(folder: Path) -> None:
    (folder / "bad.jsonl").write_text('oops\n{"text": "a"}\n')
    assert read(folder, "data.files=bad.jsonl", "data.on_bad_row=skip").graph.source == ("text",)
    with pytest.raises(DataError, match=r"bad\.jsonl"):
        _ = read(folder, "data.files=bad.jsonl").graph


@pytest.mark.parametrize("files", ["rows.jsonl", ["rows.jsonl"]])
def test_one_file_may_be_a_text(folder: Path, files: Any) -> None:
    assert read(folder, data={"files": files, "batch": 1}).data.files == ["rows.jsonl"]


@pytest.mark.parametrize("judge", ["own.py:Judge", {"call": "own.py:Judge"}])
def test_a_role_is_a_text_or_a_call_with_arguments(folder: Path, judge: Any) -> None:
    assert read(folder, roles={"judge": judge}).roles == {"judge": RoleConfig(call="own.py:Judge")}
    made = read(folder, roles={"judge": {"call": "own.py:Judge", "args": {"strict": True}}})
    assert made.roles["judge"].args == {"strict": True}
    assert made.player("judge").__name__ == "Judge"


def test_a_role_that_does_not_import_is_refused_by_name(folder: Path) -> None:
    with pytest.raises(FlowError, match=re.escape("roles.judge: 'own.py:Jugde' has no 'Jugde'; did you mean 'Judge'?")):
        read(folder, roles={"judge": "own.py:Jugde"}).player("judge")


def test_ranks_may_be_a_number(folder: Path) -> None:
    assert read(folder, placement={"groups": {"one": 3, "two": "0-1"}}).placement.groups == {"one": "3", "two": "0-1"}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"step": 3}, "unknown key 'step'; did you mean 'steps'?"),
        (
            {"zzzzzz": 3},
            "unknown key 'zzzzzz'; known: algo, bytes, checkpoint, critic, data, eval, flow, model",
        ),
        ({"base": "/"}, "unknown key 'base'"),
        ({"data": {"files": "x", "bacth": 4, "batch": 4}}, "unknown key 'data.bacth'; did you mean 'batch'?"),
        ({"placement": {"group": {}}}, "unknown key 'placement.group'; did you mean 'groups'?"),
        ({"placement": {"default": {"tpp": 2}}}, "unknown key 'placement.default.tpp'; did you mean 'tp'?"),
        (
            {"placement": {"nodes": {"a": {"gruop": "x"}}}},
            "unknown key 'placement.nodes.a.gruop'; did you mean 'group'?",
        ),
        ({"placement": {"roles": {"a": {"pd": 1}}}}, "unknown key 'placement.roles.a.pd'; known: dp, group, tp"),
        ({"roles": {"j": {"call": "x", "arg": {}}}}, "unknown key 'roles.j.arg'; did you mean 'args'?"),
        ({3: "x"}, "'3' is 3: keys should be strings"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_one(folder: Path, changed: Any, message: str) -> None:
    refused(folder, message, changed)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"steps": "3"}, "'steps' is '3': input should be a valid integer"),
        ({"steps": True}, "'steps' is True: input should be a valid integer"),
        ({"steps": -1}, "'steps' is -1: input should be greater than or equal to 0"),
        ({"steps": 2.0}, "'steps' is 2.0: input should be a valid integer"),
        ({"data": {"files": [], "batch": 1}}, "'data.files' is []: list should have at least 1 item"),
        ({"data": {"files": "x", "batch": -1}}, "'data.batch' is -1: input should be greater than 0"),
        (
            {"data": {"files": "x", "batch": 1, "on_bad_row": "drop"}},
            "'data.on_bad_row' is 'drop': input should be 'err",
        ),
        ({"placement": {"nodes": {"a": {"tp": 0}}}}, "'placement.nodes.a.tp' is 0: input should be greater than 0"),
        (
            {"placement": {"nodes": {"a": "left"}}},
            "'placement.nodes.a' is 'left'; it is a section with the keys group, dp, tp",
        ),
        ({"data": None}, "'data' is None; it is a section with the keys files, batch, repeat, fields, rename"),
        ({"placement": "left"}, "'placement' is 'left'; it is a section with the keys groups, default, roles, nodes"),
        ({"placement": {"groups": {"g": [0, 1]}}}, "'placement.groups.g' is [0, 1]: input should be a valid string"),
        ({"placement": {"groups": "all"}}, "'placement.groups' is 'all': input should be a valid dictionary"),
        ({"roles": ["judge"]}, "'roles' is ['judge']: input should be a valid dictionary"),
        ({"roles": {"judge": 3}}, "'roles.judge' is 3; it is a section with the keys call, args"),
        ({"flow": 5}, "'flow' is 5: input should be a valid string"),
        ({"flow": ["a"]}, "'flow.0' is 'a': input should be a valid dictionary"),
        ({"data": {"batch": 3}}, "'data.files' is missing; it is required"),
        ({"roles": {"judge": {"args": {}}}}, "'roles.judge.call' is missing; it is required"),
    ],
)
def test_a_wrong_value_is_refused_by_its_place(folder: Path, changed: Any, message: str) -> None:
    refused(folder, message, changed)


def refused(folder: Path, message: str, changed: dict[Any, Any]) -> None:
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(MINIMAL | changed))
    with pytest.raises(ConfigError) as e:
        load_config(path)
    said = str(e.value)
    assert said.startswith(f"{path}: ")
    assert message in said
    assert "\n" not in said


@pytest.mark.parametrize("key", ["flow", "data"])
def test_a_missing_key_is_named(folder: Path, key: str) -> None:
    (folder / "run.yaml").write_text(yaml.safe_dump({k: v for k, v in MINIMAL.items() if k != key}))
    with pytest.raises(ConfigError, match=f"'{key}' is missing; it is required"):
        load_config(folder / "run.yaml")


def test_all_problems_are_told_at_once(folder: Path) -> None:
    with pytest.raises(ConfigError) as e:
        read(folder, steps="x", seed="y", sed=1)
    assert all(f"'{key}'" in str(e.value) for key in ("steps", "seed", "sed"))


def test_bytes_of_an_unknown_field_are_refused_with_a_suggestion(folder: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape("bytes: there is no field 'lenght'; did you mean 'length'?")):
        read(folder, bytes={"lenght": 8}).plan(1)
    assert read(folder, bytes={"length": 8, "label": 8}).plan(1)  # the label is a column that nobody reads


def test_a_role_that_a_listed_flow_does_not_use_is_refused(folder: Path) -> None:
    with pytest.raises(FlowError, match="flow 'run': no node calls the role 'jugde'; remove it or call it"):
        read(folder, flow=[{"id": "a", "call": "own.py:length"}], roles={"jugde": "own.py:Judge"}).plan(1)


@pytest.mark.parametrize(
    ("override", "found"),
    [
        ("steps=7", lambda c: c.steps == 7),
        ("data.batch=64", lambda c: c.data.batch == 64),
        ("placement.nodes.a.tp=2", lambda c: c.placement.nodes["a"].tp == 2),  # sections are made on the way
        ("placement.groups.g=0-3", lambda c: c.placement.groups == {"g": "0-3"}),
        ("placement.groups.g=0%-50%", lambda c: c.placement.groups == {"g": "0%-50%"}),
        ("data.files=[a.jsonl, b.jsonl]", lambda c: c.data.files == ["a.jsonl", "b.jsonl"]),
        ("roles.judge=own.py:Judge", lambda c: c.roles["judge"].call == "own.py:Judge"),
        ("roles.judge={call: x, args: {a: 1.5}}", lambda c: c.roles["judge"].args == {"a": 1.5}),
        ("name=a=b", lambda c: c.name == "a=b"),
        ("workers=", lambda c: c.workers is None),
        ("wait_limit_s=5", lambda c: c.wait_limit_s == 5.0),
        ("restarts=0", lambda c: c.restarts == 0),
        ("stop_limit_s=5", lambda c: c.stop_limit_s == 5.0),
    ],
)
def test_an_override_is_a_line_of_the_file(folder: Path, override: str, found: Any) -> None:
    assert found(read(folder, override))


def test_an_override_may_go_into_an_empty_section(folder: Path) -> None:
    assert read(folder, "placement.groups.g=0-3", placement=None).placement.groups == {"g": "0-3"}
    assert read(folder, "placement.nodes.a.tp=2", placement={"nodes": None}).placement.nodes["a"].tp == 2
    assert read(folder, "data.batch=4", "data.files=x.jsonl", data=None).data.batch == 4


def test_the_last_override_wins(folder: Path) -> None:
    assert read(folder, "steps=1", "steps=2").steps == 2


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("steps", "override 'steps': write it as key=value, for example data.batch=64"),
        ("=3", "override '=3': write it as key=value"),
        ("steps.x=3", "override 'steps.x=3': 'steps' is not a section, it is 3"),
        ("data.batch=[1", "override 'data.batch=[1': not a YAML value: while parsing"),
        ("data.bacth=3", "unknown key 'data.bacth'; did you mean 'batch'?"),
        ("data.batch=many", "'data.batch' is 'many': input should be a valid integer"),
        ("data..batch=3", "unknown key 'data.'"),
    ],
)
def test_a_wrong_override_is_refused(folder: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        read(folder, override)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: [1", "is not YAML: while parsing"),
        (b"\tsteps: 3", "is not YAML: while scanning"),
        (b"a: \xff", "is not YAML: 'utf-8' codec can't decode"),
        (b"", "is empty, not a mapping of keys"),
        (b"# nothing\n", "is empty, not a mapping of keys"),
        (b"[1, 2]", "is [1, 2], not a mapping of keys"),
        (b"steps", "is 'steps', not a mapping of keys"),
        (b"steps: 3\nseed: 1\nsteps: 4\n", "is not YAML: the key 'steps' is there twice in"),
        (b"steps: 3\ndata: {batch: 1, files: x, batch: 2}\n", "the key 'batch' is there twice in"),
        (
            b"steps: 3\nflow:\n- {id: a}\n- {id: b, id: c}\n",
            "the key 'id' is there twice in \"<unicode string>\", line 4",
        ),
    ],
)
def test_a_file_that_is_no_config_is_refused_in_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(message)) as e:
        load_config(path)
    assert str(path) in str(e.value)
    assert "\n" not in str(e.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"there is no config file {tmp_path / 'none.yaml'}")):
        load_config(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match=re.escape(str(tmp_path))):
        load_config(tmp_path)


def test_a_file_that_cannot_be_read_is_named(folder: Path) -> None:
    path = folder / "own.py" / "run.yaml"
    with pytest.raises(ConfigError, match=re.escape(f"{path} cannot be read: Not a directory")):
        load_config(path)


def test_a_key_may_be_in_two_sections_and_overrule_a_merged_one(folder: Path) -> None:
    path = folder / "run.yaml"
    path.write_text(
        "flow: own.py:count\nsteps: 3\ndata: {files: rows.jsonl, batch: 4}\n"
        "placement:\n  default: &d {group: all, tp: 1}\n  nodes:\n    a: {<<: *d, tp: 2}\n    b: {<<: *d, tp: 4}\n"
    )
    assert {n: p.tp for n, p in load_config(path).placement.nodes.items()} == {"a": 2, "b": 4}


@pytest.mark.parametrize("text", ["flow: {{ name }}", "{[1]: 2}", "steps: 2025-13-01"])
def test_what_yaml_cannot_make_is_refused(folder: Path, text: str) -> None:
    (folder / "run.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"run\.yaml"):
        load_config(folder / "run.yaml")


def test_the_plan_is_the_same_wherever_its_files_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    roles = {"judge": "own.py:Judge"}
    plans = []
    for name in ("one", "two/three"):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / "own.py").write_text(FLOW)
        (folder / "rows.jsonl").write_text('{"text": "a"}\n')
        plans.append(read(folder, flow="own.py:measure", roles=roles).plan(1))
    first, second = plans
    assert [n["call"] for n in first.to_json()["nodes"][1:]] == ["own.py:length", "own.py:Judge.score"]
    assert first.to_json() == second.to_json()
    assert first.hash == second.hash
    other = read(tmp_path / "one", flow="own.py:count").plan(1)
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
def test_a_flow_that_is_none_is_refused(folder: Path, flow: str, message: str) -> None:
    with pytest.raises(DistflowError, match=re.escape(message)):
        _ = read(folder, flow=flow).graph


def shipped() -> list[Path]:
    return sorted((ROOT / "examples").rglob("*.yaml"))


def test_there_are_examples() -> None:
    assert len(shipped()) >= 2


@pytest.mark.parametrize("path", shipped(), ids=lambda p: str(p.relative_to(ROOT)))
def test_every_shipped_config_parses_and_plans(path: Path) -> None:
    c = load_config(path)
    if not all(Path(f).exists() for f in c.files):  # made by a script beside it
        c = load_config(path, [f"data.fields=[prompt, {'response' if c.flow == 'sft' else 'answer'}]"])
    p = c.plan(c.workers or 1)
    assert {n.id for n in c.graph.nodes} <= set(p.home)
    assert json.loads(json.dumps(p.to_json()))["samples"] == c.data.batch * c.repeat
