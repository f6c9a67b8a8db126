"""The interface of a role: plain classes are roles, and packages bring roles by entry point."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from distflow import Role
from distflow.errors import ConfigError
from distflow.roles.role import as_role, defines
from distflow.run.program import BUILT_IN_ROLES, Program
from util.test_plugins import install
from warm import distflow_run


class Counter:
    """A plain class, as users write them."""

    def __init__(self, start: int = 0) -> None:
        self.count = start

    def state(self) -> int:
        return self.count

    def restore(self, state: int) -> None:
        self.count = state


class Registered(type):
    pass


class Slotted(metaclass=Registered):
    __slots__ = ("count",)


class Own(Role):
    pass


@pytest.mark.parametrize("cls", [Counter, Slotted])
def test_a_plain_class_gets_the_methods_that_it_lacks(cls: type) -> None:
    made = as_role(cls)
    assert as_role(cls) is made
    assert (made.__name__, made.__qualname__, made.__module__) == (cls.__name__, cls.__qualname__, cls.__module__)
    role = made()
    assert isinstance(role, cls)
    assert isinstance(role, Role)
    role.check_fields([])
    role.close()
    assert list(role.sync_weights(1)) == []
    assert role.copy_weights() is None


def test_own_methods_of_a_plain_class_are_called() -> None:
    made: Any = as_role(Counter)
    role = made(3)
    assert role.state() == 3
    role.restore(5)
    assert role.state() == 5
    assert [m for m in Role.__hooks__ if defines(type(role), m)] == ["state", "restore"]


def test_a_class_that_inherits_is_a_role_as_it_is() -> None:
    assert as_role(Own) is Own
    assert not any(defines(Own, method) for method in Role.__hooks__)


def test_a_state_that_nothing_restores_is_refused() -> None:
    class Forgetful:
        def state(self) -> int:
            return 1

    with pytest.raises(ConfigError, match=r"Forgetful has a method `state\(\)`, but none to resume with; add"):
        as_role(Forgetful)


TOY = """
from distflow import Role, node


class Toy(Role):
    def __init__(self, rate=0.5):
        self.rate, self.steps = rate, 0

    def check_fields(self, fields, where=""):
        print("reads", *fields)

    @node(type="inference", writes="score")
    def score(self, batch, ctx):
        self.steps += 1
        ctx.metrics.log("toy/steps", self.steps)
        return [self.rate * len(row) for row in batch["prompt"]]

    def state(self):
        return {"steps": self.steps}

    def restore(self, state):
        self.steps = state["steps"]
"""
FLOW = """
from distflow import flow


@flow
def scored(data, scorer):
    scorer.score(data["prompt"])
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a config that names the role of an installed package."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "toy_things.py").write_text(TOY)
    install(site, "toy-things", "toy = toy_things:Toy", "distflow.roles")
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.syspath_prepend(str(site))
    (tmp_path / "flow.py").write_text(FLOW)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n{"prompt": "abc"}\n' * 2)
    config = {
        "flow": "flow.py:scored",
        "data": {"files": "rows.jsonl", "batch": 2},
        "roles": {"scorer": {"call": "toy", "args": {"rate": 0.25}}},
        "steps": 2,
        "checkpoint": {"every": 2},
        "run_dir": "run",
    }
    (tmp_path / "c.yaml").write_text(json.dumps(config))
    return tmp_path


def test_a_role_of_another_package_runs(folder: Path) -> None:
    """Each worker imports it, and its state is in the checkpoint that the run resumes from."""
    command = [sys.executable, "-m", "distflow", "run", "c.yaml"]
    first = subprocess.run([*command, "workers=2"], cwd=folder, capture_output=True, text=True)
    assert first.returncode == 0, first.stderr
    assert "reads prompt" in first.stdout + first.stderr
    ended = distflow_run(folder / "c.yaml", "steps=3", "--resume", workers=2, folder=folder)
    assert not any(ended.codes), ended.err
    assert [json.loads(r)["toy/steps"] for r in (folder / "run" / "metrics.jsonl").open()] == [1, 2, 3]


def test_the_call_of_a_role_is_a_name_that_is_installed(folder: Path) -> None:
    program = Program.load(folder / "c.yaml", ["roles.scorer.call=tyo"])
    with pytest.raises(ConfigError, match=r"roles.scorer: nothing installed is called 'tyo'; did you mean 'toy'"):
        program.implementation("scorer")


@pytest.mark.parametrize("name", BUILT_IN_ROLES)
def test_built_in_roles_are_found_by_the_same_names(folder: Path, name: str) -> None:
    built_in: Any = Program.load(folder / "c.yaml", [f"roles.scorer.call={name}"]).implementation("scorer")
    assert issubclass(built_in, Role)
