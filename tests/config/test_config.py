"""What a config may contain, and how a mistake in it is reported."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from distflow.config import Config, load_config
from distflow.config.schema import RoleConfig
from distflow.config.yaml import parse
from distflow.errors import ConfigError

MINIMAL: dict[str, Any] = {
    "flow": "own.py:count",
    "steps": 3,
    "data": {"files": "rows.jsonl", "batch": 4},
}


def load(tmp_path: Path, *overrides: str, **changes: Any) -> Config:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(MINIMAL | changes))
    return load_config(path, overrides)


def test_keys_that_are_not_given_have_defaults(tmp_path: Path) -> None:
    c = load(tmp_path)
    assert (c.name, c.workers, c.seed, c.data.on_bad_row) == ("count", None, 0, "error")
    assert c.run_folder == Path("runs/count")
    assert load(tmp_path, "run_dir=/x/y").run_folder == Path("/x/y")
    assert load(tmp_path, "name=mine").run_folder == Path("runs/mine")


@pytest.mark.parametrize("files", ["rows.jsonl", ["rows.jsonl"]])
def test_one_file_may_be_a_string(tmp_path: Path, files: Any) -> None:
    assert load(tmp_path, data={"files": files, "batch": 1}).data.files == ["rows.jsonl"]


@pytest.mark.parametrize("judge", ["own.py:Judge", {"call": "own.py:Judge"}])
def test_a_role_is_a_string_or_a_call_with_arguments(tmp_path: Path, judge: Any) -> None:
    assert load(tmp_path, roles={"judge": judge}).roles == {"judge": RoleConfig(call="own.py:Judge")}
    config = load(tmp_path, roles={"judge": {"call": "own.py:Judge", "args": {"strict": True}}})
    assert config.roles["judge"].args == {"strict": True}


def test_ranks_may_be_a_number(tmp_path: Path) -> None:
    assert load(tmp_path, placement={"ranks": {"one": 3, "two": "0-1"}}).placement.ranks == {"one": "3", "two": "0-1"}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"step": 3}, "unknown key 'step'; did you mean 'steps'?"),
        (
            {"zzzzzz": 3},
            "unknown key 'zzzzzz'; known: algo, bytes, checkpoint, critic, data, environment",
        ),
        ({"base": "/"}, "unknown key 'base'"),
        ({"Steps": 3}, "unknown key 'Steps'; did you mean 'steps'?"),
        ({"rollout": {"N": 4}}, "unknown key 'rollout.N'; did you mean 'n'?"),
        ({"lr": 1}, "unknown key 'lr'; did you mean 'train.lr' or 'critic.lr'?"),
        ({"train": {"max_tokens": 1}}, "unknown key 'train.max_tokens'; did you mean 'rollout.max_tokens'?"),
        ({"data": {"files": "x", "bacth": 4, "batch": 4}}, "unknown key 'data.bacth'; did you mean 'batch'?"),
        ({"placement": {"rank": {}}}, "unknown key 'placement.rank'; did you mean 'ranks'?"),
        ({"placement": {"groups": {}}}, "unknown key 'placement.groups'; 'groups' is called 'ranks'"),
        ({"placement": {"nodes": {"a": {"group": "x"}}}}, "'placement.nodes.a.group'; 'group' is called 'ranks'"),
        ({"placement": {"default": {"tpp": 2}}}, "unknown key 'placement.default.tpp'; did you mean 'tp'?"),
        (
            {"placement": {"nodes": {"a": {"rnaks": "x"}}}},
            "unknown key 'placement.nodes.a.rnaks'; did you mean 'ranks'?",
        ),
        ({"placement": {"roles": {"a": {"pd": 1}}}}, "unknown key 'placement.roles.a.pd'; known: dp, ranks, sp, tp"),
        ({"roles": {"j": {"call": "x", "arg": {}}}}, "unknown key 'roles.j.arg'; did you mean 'args'?"),
        ({3: "x"}, "'3' is 3: keys should be strings"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_one(tmp_path: Path, changed: Any, message: str) -> None:
    refused(tmp_path, message, changed)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"steps": "3"}, "'steps' is '3': input should be a valid integer"),
        ({"steps": True}, "'steps' is True: input should be a valid integer"),
        ({"steps": -1}, "'steps' is -1: input should be greater than or equal to 0"),
        ({"steps": 2.0}, "'steps' is 2.0: input should be a valid integer"),
        (
            {"data": {"files": [], "batch": 1}},
            "'data' is {'batch': 1, 'files': []}: give one of `files` and `sources`",
        ),
        ({"data": {"files": "x", "batch": -1}}, "'data.batch' is -1: input should be greater than 0"),
        (
            {"data": {"files": "x", "batch": 1, "on_bad_row": "drop"}},
            "'data.on_bad_row' is 'drop': input should be 'err",
        ),
        ({"placement": {"nodes": {"a": {"tp": 0}}}}, "'placement.nodes.a.tp' is 0: input should be greater than 0"),
        (
            {"placement": {"nodes": {"a": "left"}}},
            "'placement.nodes.a' is 'left'; it is a section with the keys ranks, dp, sp, tp",
        ),
        ({"data": None}, "'data' is None; it is a section with the keys files, batch, repeat, fields, rename"),
        ({"placement": "left"}, "'placement' is 'left'; it is a section with the keys ranks, default, roles, nodes"),
        ({"placement": {"ranks": {"g": [0, 1]}}}, "'placement.ranks.g' is [0, 1]: input should be a valid string"),
        ({"placement": {"ranks": "all"}}, "'placement.ranks' is 'all': input should be a valid dictionary"),
        ({"roles": ["judge"]}, "'roles' is ['judge']: input should be a valid dictionary"),
        ({"roles": {"judge": 3}}, "'roles.judge' is 3; it is a section with the keys call, args"),
        ({"flow": 5}, "'flow' is 5: input should be a valid string"),
        ({"flow": ["a"]}, "'flow.0' is 'a': input should be a valid dictionary"),
        ({"data": {"batch": 3}}, "'data' is {'batch': 3}: give one of `files` and `sources`"),
        ({"roles": {"judge": {"args": {}}}}, "'roles.judge' is {'args': {}}: give one of `call`"),
    ],
)
def test_a_wrong_value_is_refused_with_its_key(tmp_path: Path, changed: Any, message: str) -> None:
    refused(tmp_path, message, changed)


def refused(tmp_path: Path, message: str, changed: dict[Any, Any]) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(MINIMAL | changed))
    with pytest.raises(ConfigError) as e:
        load_config(path)
    error = str(e.value)
    assert error.startswith(f"{path}: ")
    assert message in error
    assert "\n" not in error


@pytest.mark.parametrize("key", ["flow", "data"])
def test_a_missing_key_is_named(tmp_path: Path, key: str) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({k: v for k, v in MINIMAL.items() if k != key}))
    with pytest.raises(ConfigError, match=f"'{key}' is missing; it is required"):
        load_config(tmp_path / "run.yaml")


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as e:
        load(tmp_path, steps="x", seed="y", sed=1)
    assert all(f"'{key}'" in str(e.value) for key in ("steps", "seed", "sed"))


@pytest.mark.parametrize(
    ("override", "found"),
    [
        ("steps=7", lambda c: c.steps == 7),
        ("data.batch=64", lambda c: c.data.batch == 64),
        ("placement.nodes.a.tp=2", lambda c: c.placement.nodes["a"].tp == 2),  # sections are made on the way
        ("placement.ranks.g=0-3", lambda c: c.placement.ranks == {"g": "0-3"}),
        ("placement.ranks.g=0%-50%", lambda c: c.placement.ranks == {"g": "0%-50%"}),
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
def test_an_override_sets_a_key(tmp_path: Path, override: str, found: Any) -> None:
    assert found(load(tmp_path, override))


def test_an_override_may_go_into_an_empty_section(tmp_path: Path) -> None:
    assert load(tmp_path, "placement.ranks.g=0-3", placement=None).placement.ranks == {"g": "0-3"}
    assert load(tmp_path, "placement.nodes.a.tp=2", placement={"nodes": None}).placement.nodes["a"].tp == 2
    assert load(tmp_path, "data.batch=4", "data.files=x.jsonl", data=None).data.batch == 4


def test_the_last_override_wins(tmp_path: Path) -> None:
    assert load(tmp_path, "steps=1", "steps=2").steps == 2


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
def test_a_wrong_override_is_refused(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load(tmp_path, override)


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
        (b"steps: 3\nseed: 1\nsteps: 4\n", "is not YAML: the key 'steps' is given twice in"),
        (b"steps: 3\ndata: {batch: 1, files: x, batch: 2}\n", "the key 'batch' is given twice in"),
        (
            b"steps: 3\nflow:\n- {id: a}\n- {id: b, id: c}\n",
            "the key 'id' is given twice in \"<unicode string>\", line 4",
        ),
    ],
)
def test_a_file_that_is_not_a_config_is_refused_in_one_line(tmp_path: Path, content: bytes, message: str) -> None:
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


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "run.yaml"
    with pytest.raises(ConfigError, match=re.escape(f"{path} cannot be read: Not a directory")):
        load_config(path)


def test_a_key_may_be_in_two_sections_and_override_a_merged_one(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "flow: own.py:count\nsteps: 3\ndata: {files: rows.jsonl, batch: 4}\n"
        "placement:\n  default: &d {ranks: all, tp: 1}\n  nodes:\n    a: {<<: *d, tp: 2}\n    b: {<<: *d, tp: 4}\n"
    )
    assert {n: p.tp for n, p in load_config(path).placement.nodes.items()} == {"a": 2, "b": 4}


@pytest.mark.parametrize("text", ["flow: {{ name }}", "{[1]: 2}", "steps: 2025-13-01"])
def test_yaml_without_a_plain_value_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"run\.yaml"):
        load_config(tmp_path / "run.yaml")


def test_a_number_of_many_digits_is_not_even_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """`1:59:59…` is a number in base 60: 900 kB of it would take PyYAML half a minute."""

    def read(*_: object) -> None:
        raise AssertionError("this takes long")

    monkeypatch.setattr("yaml.constructor.SafeConstructor.construct_yaml_int", read)
    with pytest.raises(ValueError, match=r"the number 1:59:59:59:59:59:59:59:59:59:… is too large"):
        parse("steps: 1" + ":59" * 1000)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"environment": {"max_turns": 3}}, "give one of `call` (file.py:name), `tools`"),
        ({"environment": {"call": "a.py:b", "command": ["x"]}}, "give one of `command` (a program) and `call`"),
        ({"environment": "a.py:b", "environments": {"c": "d.py:e"}}, "give one of `environment` and `environments`"),
        ({"environments": {"c": {"call": "d.py:e", "ratio": 0}}}, "all have the ratio 0"),
        (
            {"environments": {"c": "d.py:e", "f": {"call": "d.py:e", "endpoint_host": "0.0.0.0"}}},
            "endpoint_host, 0.0.0.0 and 127.0.0.1",
        ),
        ({"environment": {"call": "a.py:b", "turns": 3}}, "unknown key 'environment.turns'"),
        ({"environments": {"c": {"call": "d.py:e", "max_turn": 3}}}, "did you mean 'max_turns'?"),
    ],
)
def test_environments_are_checked(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    refused(tmp_path, message, changed)


def test_an_environment_may_be_given_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(MINIMAL | {"environment": "game.py:Guess"}))
    config = load_config(path, ["environment.max_turns=3"])
    assert config.environment is not None
    assert (config.environment.call, config.environment.max_turns) == ("game.py:Guess", 3)
    path.write_text(yaml.safe_dump(MINIMAL | {"environments": {"a": "a.py:A", "b": {"tools": "b.py:f"}}}))
    assert [e.call or e.tools for e in load_config(path).environments.values()] == ["a.py:A", ["b.py:f"]]


@pytest.mark.parametrize(
    ("keys", "steps"),
    [({}, 5), ({"epochs": 1}, 5), ({"epochs": 2}, 10), ({"epochs": 0.5}, 2), ({"epochs": 0.01}, 1), ({"steps": 3}, 3)],
)
def test_epochs_are_passes_over_the_data(tmp_path: Path, keys: dict[str, Any], steps: int) -> None:
    assert load(tmp_path, **({"steps": None} | keys)).steps_of(20) == steps  # of 4 prompts each


def test_steps_and_epochs_are_not_given_together(tmp_path: Path) -> None:
    refused(tmp_path, r": give one of `steps` (3) and `epochs` (2), the other as null", {"epochs": 2})


def test_trackers_are_names_or_have_settings(tmp_path: Path) -> None:
    assert load(tmp_path, track="wandb").track.keys() == {"wandb"}
    assert load(tmp_path, track=["wandb", "mlflow"]).track.keys() == {"wandb", "mlflow"}
    track = load(tmp_path, track={"wandb": {"project": "p", "tags": "a"}, "tensorboard": {}}).track
    assert (track["wandb"].project, track["wandb"].tags) == ("p", ["a"])
    refused(tmp_path, "mlflow has no 'entity'; known: name, project", {"track": {"mlflow": {"entity": "us"}}})
    refused(
        tmp_path, "unknown key 'track.wandb.projekt'; did you mean 'project'?", {"track": {"wandb": {"projekt": 1}}}
    )
