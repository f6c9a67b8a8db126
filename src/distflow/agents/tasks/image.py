"""Images of tasks for boxes: folders that are built once and kept, as a cache of this user."""

import glob
import json
import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from distflow.agents.spec import EnvironmentSetupError
from distflow.agents.tasks.dockerfile import Step, check_base, command_of, commands, read_steps, without_installs
from distflow.agents.tasks.task import WORKDIR, Task, digest
from distflow.sandbox.box.box import Box, BoxLimits

_BUILD_S = 600.0
_VERSION = "1"  # of what is built of the same files


@dataclass
class Image:
    """The contents of a new box."""

    folder: Path
    workdir: str = "/"
    variables: dict[str, str] = field(default_factory=dict)


def check_image(task: Task) -> None:
    """Raises if the task needs what a box does not have; builds nothing."""
    try:
        for step in _steps(task):
            if step.instruction == "RUN":
                without_installs(command_of(step), str(step))
        for number, line in commands((task.tests / "test.sh").read_text()):
            without_installs(line, f"line {number} of its tests/test.sh, {line[:60]}")
    except EnvironmentSetupError as e:
        raise EnvironmentSetupError(f"task '{task.name}': {e}") from None


def build(task: Task) -> Image:
    """Returns the task's image, which is built if it is not there."""
    where = _cache() / f"{_VERSION}-{digest(task.environment)}"
    image = Image(where, variables=dict(task.variables))
    made = Path(tempfile.mkdtemp(dir=_cache(), prefix="building-")) if not where.is_dir() else None
    try:
        _follow(task, image, made)
        if made is not None:
            os.chmod(made, 0o755)
            try:
                os.rename(made, where)
            except OSError:  # another process was faster
                if not where.is_dir():
                    raise
    except EnvironmentSetupError as e:
        raise EnvironmentSetupError(f"task '{task.name}': {e}") from None
    finally:
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)
    return image


def _cache() -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "distflow" / "images"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _steps(task: Task) -> list[Step]:
    if task.dockerfile is None:
        if task.base_image:
            check_base(task.base_image, "`environment.docker_image`")
        return []
    return read_steps(task.dockerfile.read_text())


def _follow(task: Task, image: Image, made: Path | None) -> None:
    """Follows the Dockerfile: into the folder `made`, or, where the image is there already, for its settings alone."""
    given: dict[str, str] = {}
    if task.dockerfile is None:
        image.workdir = WORKDIR
        if made is not None:
            (made / WORKDIR[1:]).mkdir(parents=True)
            if task.environment.is_dir():
                shutil.copytree(task.environment, made / WORKDIR[1:], symlinks=True, dirs_exist_ok=True)
    for step in _steps(task):
        rest = step.rest if step.instruction == "RUN" else _expand(step.rest, {**given, **image.variables})
        match step.instruction:
            case "WORKDIR":
                image.workdir = os.path.join(image.workdir, rest)
                if made is not None:
                    (made / image.workdir.lstrip("/")).mkdir(parents=True, exist_ok=True)
            case "ENV":
                image.variables |= _assignments(rest)
            case "ARG":
                given |= _assignments(rest) if "=" in rest else {}
            case "COPY" | "ADD" if made is not None:
                _copy(step, rest, task.environment, made, image.workdir)
            case "RUN" if made is not None:
                _run(step, made, image, given, task)


def _expand(text: str, variables: Mapping[str, str]) -> str:
    return re.sub(r"\$\{?(\w+)\}?", lambda found: variables.get(found[1], ""), text)


def _assignments(rest: str) -> dict[str, str]:
    if "=" not in rest.split(" ")[0]:
        name, _, value = rest.partition(" ")
        return {name: value.strip()}
    return {w.partition("=")[0]: w.partition("=")[2] for w in shlex.split(rest) if "=" in w}


def _copy(step: Step, rest: str, context: Path, made: Path, workdir: str) -> None:
    words = [w for w in rest.split() if not w.startswith("--")]
    if rest.lstrip().startswith("["):
        words = json.loads(rest)
    *sources, target = words
    found = [Path(p) for s in sources for p in sorted(glob.glob(str(context / s.lstrip("/").rstrip("/")) or "."))]
    inside = context.resolve()
    if not found or not all(p.resolve().is_relative_to(inside) for p in found):
        raise EnvironmentSetupError(f"{step}: there is no such file in {context}")
    place = made / os.path.join(workdir, target).lstrip("/")
    into = target.endswith(("/", ".")) or len(found) > 1 or place.is_dir()
    for path in found:
        if path.is_dir():
            shutil.copytree(path, place, symlinks=True, dirs_exist_ok=True)
        else:
            file = place / path.name if into else place
            file.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, file)


def _run(step: Step, made: Path, image: Image, given: Mapping[str, str], task: Task) -> None:
    command = without_installs(command_of(step), str(step))
    if not command.strip():
        return
    limits = BoxLimits(task.memory_mb, task.disk_mb)
    with Box(made, limits, writable_image=True) as box:
        ended = box.run(["sh", "-c", command], image.workdir, {**given, **image.variables}, _BUILD_S)
    if ended.code or ended.timeout:
        how = "took too long" if ended.timeout else f"exited with {ended.code}"
        raise EnvironmentSetupError(f"{step}: {how}: {ended.output[-300:].strip()}")
