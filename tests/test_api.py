"""The Python API: configs as dicts, functions as objects, results, calls per step, and errors with the way out."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import distflow
from distflow import api
from distflow.errors import ConfigError, DistflowError, FlowError
from distflow.flow.object_reference import object_reference
from limits import load_factor

ROOT = Path(__file__).parents[1]
NODES = """
import os
from distflow import flow, node

@node
def length(batch, ctx, fail_at=0):
    if ctx.step == fail_at:
        raise ValueError("this step is bad")
    ctx.metrics.log("length/mean", sum(map(len, batch["prompt"])) / len(batch), len(batch))
    return [len(p) for p in batch["prompt"]]

@flow
def measure(data, *, fail_at=0):
    length(data["prompt"], fail_at=fail_at)

class Judge:
    def score(self, batch): ...
"""
SCRIPT = """
import json
import sys

import distflow
from distflow import flow, node

@node
def length(batch, ctx):
    ctx.metrics.log("length/mean", sum(map(len, batch["prompt"])) / len(batch), len(batch))

@flow
def measure(data):
    length(data["prompt"])

def stop(step, metrics):
    seen.append((step, metrics["length/mean"]))
    if step == int(sys.argv[1]):
        raise KeyError("enough")

seen = []
if {guard}:
    try:
        result = distflow.run(flow=measure, data={{"files": "rows.jsonl", "batch": 2}}, steps=3, on_step=stop)
        steps = [m["step"] for m in result.metrics]
        print(json.dumps([steps, str(result.folder), str(result.checkpoint), [s for s, _ in seen]]))
    except KeyError as e:
        print(json.dumps([str(e), seen[0][0]]))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # loading a file adds its folder
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "mine.py").write_text(NODES)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": "x" * i}) + "\n" for i in range(1, 9)))
    return tmp_path


def imported(folder: Path, name: str = "mine") -> Any:
    """Imports the file as a script does that is beside it."""
    module = ModuleType(name)
    module.__file__ = str(folder / f"{name}.py")
    sys.modules[name] = module
    exec(compile(Path(module.__file__).read_text(), module.__file__, "exec"), module.__dict__)
    return module


def test_a_dict_and_keywords_are_a_config(folder: Path) -> None:
    mine = imported(folder)
    config = {"flow": mine.measure, "data": {"files": folder / "rows.jsonl", "batch": 2}, "steps": 3}
    plan = distflow.plan(config, ["workers=2"], data={"batch": 4}, algo={"fail_at": 7})
    assert (plan.flow.name, plan.workers, plan.samples) == ("measure", 2, 4)
    assert plan.flow.nodes[0].params == {"fail_at": 7}
    (folder / "run.yaml").write_text(yaml.safe_dump({"flow": "mine.py:measure", "data": "rows.jsonl", "workers": 2}))
    from_file = distflow.plan(folder / "run.yaml", data={"files": "rows.jsonl", "batch": 4}, algo={"fail_at": 7})
    assert from_file.hash == plan.hash
    assert distflow.check(config)[0] == "flow      measure: length"


def test_objects_anywhere_in_a_config_are_named(folder: Path) -> None:
    mine = imported(folder)
    config = {
        "flow": [{"id": "length", "call": mine.length, "reads": "prompt"}],
        "roles": {"judge": {"call": mine.Judge}},
    }
    named = api._plain(config, "")
    assert named["flow"][0]["call"] == f"{folder / 'mine.py'}:length"
    assert named["roles"]["judge"]["call"] == f"{folder / 'mine.py'}:Judge"
    assert object_reference(json.dumps, "reward") == "json:dumps"


def test_what_workers_cannot_import_is_refused_with_the_way_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = imported(folder)

    def inner() -> None: ...

    cases = {
        "is a lambda, which workers cannot import": lambda: 0,
        "is defined inside 'test_what_workers_cannot_import": inner,
        "is a functools.partial, which workers cannot import": functools.partial(mine.length, fail_at=1),
        "is a method, which workers cannot import": mine.Judge().score,
    }
    for message, value in cases.items():
        with pytest.raises(FlowError, match=f"^reward: .*{message}"):
            distflow.plan({"flow": "grpo"}, reward=value)
    mine.length.__wrapped__.__module__ = "__main__"
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    with pytest.raises(FlowError, match=r"'length' is defined in an interactive session.*%%writefile mine.py"):
        distflow.plan({"flow": "grpo"}, reward=mine.length)


def test_mistakes_name_the_key(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"the config: unknown key 'data.bacth'; did you mean 'batch'"):
        distflow.plan({"flow": "mine.py:measure", "data": {"files": "rows.jsonl", "bacth": 3}})
    with pytest.raises(ConfigError, match=r"there is no config file none\.yaml"):
        distflow.run("none.yaml")
    with pytest.raises(ConfigError, match="the config has no `eval` section"):
        distflow.evaluate({"flow": "mine.py:measure", "data": "rows.jsonl"})


def script(folder: Path, *words: str, guard: str = '__name__ == "__main__"') -> "subprocess.CompletedProcess[str]":
    (folder / "script.py").write_text(SCRIPT.format(guard=guard))
    command = [sys.executable, "script.py", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200 * load_factor())


def test_a_script_trains_with_its_own_functions(folder: Path) -> None:
    done = script(folder, "0")
    result = json.loads(done.stdout.splitlines()[-1])
    assert result == [[1, 2, 3], "runs/measure", "runs/measure/checkpoints/step_3", [1, 2, 3]], done.stderr


def test_a_call_that_raises_ends_the_run(folder: Path) -> None:
    done = script(folder, "1")
    assert json.loads(done.stdout.splitlines()[-1]) == ["'enough'", 1], done.stderr


def test_a_script_without_a_guard_is_refused_before_anything_starts(folder: Path) -> None:
    done = script(folder, "0", guard="True")
    assert done.returncode == 1
    assert "script.py calls distflow.run() when it is imported, as every worker does" in done.stderr
    assert 'put the call under `if __name__ == "__main__":`' in done.stderr
    assert not (folder / "runs").exists()


def test_a_run_that_fails_raises_its_cause_and_leaves_the_environment_as_it_was(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")
    before = dict(os.environ)
    with pytest.raises(DistflowError, match="rank 0, step 2, node 'length': ValueError: this step is bad"):
        distflow.run(flow="mine.py:measure", data={"files": "rows.jsonl", "batch": 2}, steps=3, algo={"fail_at": 2})
    assert os.environ == before
