"""Adapters of environments by entry point, and what is said about their tests."""

import re
import tomllib
from pathlib import Path

import pytest

from agents.fake_model import converse, start_message
from distflow.agents.adapter import BUILT_IN, adapter_of
from distflow.agents.env_pool import EnvPool
from distflow.agents.spec import EnvironmentSetupError, EnvironmentSpec

ROOT = Path(__file__).parents[2]
TOY = """
from distflow.agents.adapter import EnvironmentAdapter
from distflow.agents.child import Outcome
from distflow.agents.rows import as_messages
from distflow.agents.spec import Description


def drive(environment, start, session):
    session.begin(as_messages(start["prompt"]))
    return Outcome(float(environment.target.judge(session.turn().text)))


ADAPTER = EnvironmentAdapter(
    lambda environment: Description("toy"),
    drive,
    lambda target: hasattr(target, "judge"),
    "a toy",
)
"""
# With `reset`, it would be TRL's for the built-in adapters.
ENVIRONMENT = """
class Toy:
    def reset(self): ...

    @staticmethod
    def judge(text):
        return len(text)
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of somebody else with an adapter."""
    (tmp_path / "toy_package.py").write_text(TOY)
    (tmp_path / "mine.py").write_text(ENVIRONMENT)
    info = tmp_path / "toy_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[distflow.environments]\ntoy = toy_package:ADAPTER\n")
    monkeypatch.syspath_prepend(str(tmp_path))  # the processes of environments get the worker's path
    return tmp_path


def test_an_adapter_of_another_package_by_entry_point(installed: Path) -> None:
    pool = EnvPool([EnvironmentSpec("toy", "mine.py:Toy")], installed)
    try:
        assert pool.describe()[0].kind == "toy"
        (conversation,) = converse(pool, [start_message()], ["four"])
    finally:
        pool.close()
    assert conversation.failure is None
    assert conversation.result
    assert conversation.result["reward"] == 4.0


def test_an_entry_point_that_is_no_adapter_is_named(installed: Path) -> None:
    (installed / "toy_package.py").write_text("ADAPTER = 'text'\n")
    pool = EnvPool([EnvironmentSpec("toy", "mine.py:Toy", kind="toy")], installed)
    try:
        with pytest.raises(EnvironmentSetupError, match=r"entry point 'toy' of distflow.environments is a str, not"):
            pool.describe()
    finally:
        pool.close()


def test_the_docs_say_which_packages_an_adapter_is_tested_with() -> None:
    documented: dict[str, set[str]] = {}
    for line in (ROOT / "docs" / "environments.md").read_text().splitlines():
        if row := re.fullmatch(r"\|.*\| `(\w+)` \| ([^|]+) \|", line):
            documented.setdefault(row[1], set()).update(re.findall(r"`([^`]+)`", row[2]))
    assert documented == {kind: set(adapter_of(kind, "here").tested_with) for kind in BUILT_IN}


def test_ci_installs_what_adapters_are_tested_with() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    installed = {re.split(r"[<>=\[]", requirement)[0] for requirement in extras["dev"]}
    assert {package for kind in BUILT_IN for package in adapter_of(kind, "here").tested_with} <= installed
