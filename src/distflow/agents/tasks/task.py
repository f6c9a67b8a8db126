"""Reads a task's folder; whatever it asks for that is not supported is refused by name."""

import hashlib
import json
import math
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distflow.agents.spec import EnvironmentSetupError
from distflow.errors import cut, shown, suggest

TESTS, LOGS, WORKDIR = "/tests", "/logs/verifier", "/app"
_DEPTH = 6  # folders between a set of tasks and one of them
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?", re.IGNORECASE)


@dataclass(frozen=True)
class Task:
    """A task, for any agent; `command` runs `tests` when the agent is done."""

    name: str
    instruction: str
    environment: Path  # a Dockerfile and its files, or just files
    tests: Path
    agent_s: float = 600.0
    verifier_s: float = 600.0
    variables: Mapping[str, str] = field(default_factory=dict)  # of the environment
    verifier_variables: Mapping[str, str] = field(default_factory=dict)
    base_image: str | None = None  # without a Dockerfile
    memory_mb: int = 2048
    disk_mb: int = 1024
    internet: bool = True  # if there is one: a box has none

    @property
    def dockerfile(self) -> Path | None:
        path = self.environment / "Dockerfile"
        return path if path.is_file() else None


def find_tasks(folder: Path, where: str) -> dict[str, Path]:
    """Returns the folders of tasks by name: the folder itself, or those below it."""
    if (folder / "task.toml").is_file():
        return {folder.name: folder}
    found = dict(sorted((str(path.relative_to(folder)), path) for path in _below(folder, _DEPTH)))
    if not found:
        what = "there is no task.toml in it or below it" if folder.is_dir() else "there is no such folder"
        raise EnvironmentSetupError(f"{where}: '{folder}': {what}")
    return found


def _below(folder: Path, depth: int) -> Iterator[Path]:
    if not folder.is_dir() or depth < 0:
        return
    for path in folder.iterdir():
        if (path / "task.toml").is_file():
            yield path
        elif path.is_dir() and not path.is_symlink() and not path.name.startswith("."):
            yield from _below(path, depth - 1)


def read_task(folder: Path, name: str) -> Task:
    """Raises EnvironmentSetupError, which names the task and what is wrong."""
    where = f"task '{name}'"
    try:
        config = tomllib.loads((folder / "task.toml").read_text())
    except (OSError, ValueError) as e:
        raise EnvironmentSetupError(f"{where}: task.toml cannot be read: {e}") from e
    for part in ("instruction.md", "tests/test.sh"):
        if not (folder / part).is_file():
            several = "; tasks of several steps are not supported" if (folder / "steps").is_dir() else ""
            raise EnvironmentSetupError(f"{where}: there is no {part} in {folder}{several}")
    environment, verifier = _section(config, "environment", where), _section(config, "verifier", where)
    _refuse(folder, config, environment, verifier, where)
    return Task(
        name,
        _instruction(folder / "instruction.md"),
        folder / "environment",
        folder / "tests",
        _seconds(_section(config, "agent", where), where, "agent"),
        _seconds(verifier, where, "verifier"),
        _variables(environment, where),
        _variables(verifier, where),
        environment.get("docker_image"),
        _megabytes(environment, "memory", 2048, where),
        _megabytes(environment, "storage", 1024, where),
        environment.get("allow_internet", True) is not False and environment.get("network_mode") != "no-network",
    )


def _section(config: Mapping[str, Any], name: str, where: str) -> Mapping[str, Any]:
    section = config.get(name, {})
    if not isinstance(section, dict):
        raise EnvironmentSetupError(f"{where}: `{name}` of task.toml is {shown(section, 40)}, not a section")
    return section


def _refuse(
    folder: Path, config: Mapping[str, Any], environment: Mapping[str, Any], verifier: Mapping[str, Any], where: str
) -> None:
    wanted = {
        "steps": config.get("steps") or (folder / "steps").is_dir(),
        "environment.gpus": environment.get("gpus"),
        "environment.mcp_servers": environment.get("mcp_servers"),
        "environment.network_mode": environment.get("network_mode", "public") not in ("public", "no-network")
        and environment["network_mode"],
        "environment.healthcheck": environment.get("healthcheck"),
        "environment.os": environment.get("os", "linux") not in ("linux", None) and environment["os"],
        "verifier.environment_mode": verifier.get("environment_mode", "shared") != "shared"
        and verifier["environment_mode"],
        "docker-compose.yaml": (folder / "environment" / "docker-compose.yaml").is_file(),
    }
    for name, value in wanted.items():
        if value:
            said = "" if value is True else f" = {shown(value, 60)}"
            raise EnvironmentSetupError(f"{where}: `{name}`{said} is not supported; leave this task out")


def _instruction(path: Path) -> str:
    """Returns what the agent is told, without the line that asks collectors of training texts to leave it out."""
    lines = path.read_text().splitlines(keepends=True)
    while lines and (not lines[0].strip() or (lines[0].startswith(("<!--", "#")) and "canary" in lines[0].lower())):
        del lines[0]
    return "".join(lines).strip()


def _seconds(section: Mapping[str, Any], where: str, name: str) -> float:
    value = section.get("timeout_sec", 600.0)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise EnvironmentSetupError(f"{where}: `{name}.timeout_sec` is {shown(value, 40)}, not a number of seconds")
    return float(value)


def _variables(section: Mapping[str, Any], where: str) -> dict[str, str]:
    variables = section.get("env") or {}
    for key, value in variables.items() if isinstance(variables, dict) else [("env", variables)]:
        if not isinstance(value, str):
            raise EnvironmentSetupError(f"{where}: the variable `{key}` is {shown(value, 40)}, not a text")
        if re.search(r"\$\{?\w", value):
            what = "a variable of this machine is not given to tasks"
            raise EnvironmentSetupError(f"{where}: the variable `{key}` is {cut(value, 40)}: {what}; write its value")
    return dict(variables)


def _megabytes(section: Mapping[str, Any], name: str, default: int, where: str) -> int:
    """Reads `memory_mb = 2048` or `memory = "2G"`."""
    if (number := section.get(f"{name}_mb")) is not None:
        if isinstance(number, int) and not isinstance(number, bool) and number > 0:
            return number
    elif (text := section.get(name)) is None:
        return default
    elif isinstance(text, str) and (found := _SIZE.fullmatch(text.strip())):
        return max(1, int(float(found[1]) * 1024 ** (" KMGT".index(found[2].upper() or " ")) / (1 << 20)))
    raise EnvironmentSetupError(f"{where}: `environment.{name}` is no size")


def task_of(row: Mapping[str, Any], tasks: Mapping[str, Path]) -> Task:
    """Returns the task of a row, by its column `task`; that of the only one needs no column."""
    name = row.get("task") if len(tasks) > 1 or "task" in row else next(iter(tasks))
    if name not in tasks:
        raise EnvironmentSetupError(f"there is no task {shown(name, 60)}{suggest(str(name), tasks)}")
    return read_task(tasks[str(name)], str(name))


def reward_of(text: bytes | None, data: bytes | None) -> tuple[float, dict[str, float]]:
    """Reads reward.txt or reward.json; returns the reward, and the other numbers. Raises ValueError."""
    if data is not None:
        values = json.loads(data)
        numbers = values if isinstance(values, dict) else {"reward": values}
        if not all(isinstance(v, int | float) and math.isfinite(v) for v in numbers.values()):
            raise ValueError("reward.json has something that is no number")
        name = "reward" if "reward" in numbers or len(numbers) != 1 else next(iter(numbers))
        if name not in numbers:
            raise ValueError(f"reward.json has no `reward` among {', '.join(sorted(numbers))}")
        return float(numbers[name]), {k: float(v) for k, v in numbers.items() if k != name}
    if text is None:
        raise ValueError("there is neither reward.txt nor reward.json")
    value = float(text.decode(errors="replace").strip() or "nan")
    if not math.isfinite(value):
        raise ValueError("reward.txt has no number")
    return value, {}


def digest(folder: Path) -> str:
    """Returns a hash of a folder's files: their names, modes and content."""
    made = hashlib.sha256()
    for path in sorted(folder.rglob("*")) if folder.is_dir() else ():
        made.update(f"{path.relative_to(folder)}\0{path.lstat().st_mode}\0".encode())
        made.update(os.readlink(path).encode() if path.is_symlink() else path.read_bytes() if path.is_file() else b"")
    return made.hexdigest()[:24]
