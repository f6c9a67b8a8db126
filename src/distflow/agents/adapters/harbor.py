"""Folders of tasks in Harbor's format: `call: harbor:DIR`. The model works in a shell, then the task's tests score it.

Each conversation has a private copy of the task's files: a container where Docker or Podman runs, a box elsewhere. A
row names its task in the column `task`: `python -m distflow.agents.adapters.harbor DIR > tasks.jsonl` writes such rows.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from distflow.agents.adapter import EnvironmentAdapter, LoadedEnvironment
from distflow.agents.adapters.tools import ToolCounts, call_tools, function_tool, json_schemas
from distflow.agents.child import ChildSession, EnvironmentFault, Outcome
from distflow.agents.rows import as_messages
from distflow.agents.spec import Description, EnvironmentSetupError
from distflow.agents.tasks.container import Container, build_image, find_engine
from distflow.agents.tasks.image import build, check_image
from distflow.agents.tasks.task import LOGS, TESTS, Task, find_tasks, read_task, reward_of, task_of
from distflow.errors import shown, suggest
from distflow.sandbox.box.box import Box, BoxError, BoxLimits, BoxResult

ARGS = {"command_s": 20.0, "engine": "auto", "output_chars": 8000}
ENGINES = ("auto", "box", "docker", "podman")
_DEFAULT_LIMIT_S = 30.0  # of an environment
_SHARE = 0.8  # of the environment's time limit, for a command


class Place(Protocol):
    """A workplace of a task: a Box or a Container."""

    def run(
        self, argv: list[str], cwd: str = "/", env: Mapping[str, str] | None = None, wall_s: float = 30.0
    ) -> BoxResult: ...

    def put(self, path: str, files: Mapping[str, bytes] | Path, instead: bool = False) -> None: ...

    def get(self, path: str, most: int = 1 << 20) -> bytes | None: ...

    def close(self) -> None: ...


class Shell:
    """The tools of the model."""

    def __init__(self, place: Place, workdir: str, variables: Mapping[str, str], seconds: float, chars: int) -> None:
        self._place, self._workdir, self._variables = place, workdir, variables
        self._seconds, self._chars = seconds, chars

    def bash(self, command: str) -> str:
        """Runs a command in bash and returns what it prints. Each command begins in the working directory.

        Args:
            command: the command.
        """
        ended = self._place.run(["bash", "-c", command], self._workdir, self._variables, self._seconds)
        note = f"\n[took longer than {self._seconds:g} s and was killed]" if ended.timeout else ""
        note += f"\n[exit code {ended.code}]" if ended.code and not ended.timeout else ""
        return self._short(ended.output) + note

    def read_file(self, path: str) -> str:
        """Returns the text of a file.

        Args:
            path: of the file; relative ones begin in the working directory.
        """
        return self._short(self._read(path))

    def write_file(self, path: str, content: str) -> str:
        """Writes a file; what it had is replaced.

        Args:
            path: of the file; relative ones begin in the working directory.
            content: the text.
        """
        folder, _, name = self._absolute(path).rpartition("/")
        self._place.put(folder or "/", {name: content.encode()})
        return f"wrote {len(content)} characters"

    def edit_file(self, path: str, old: str, new: str) -> str:
        """Replaces a text in a file; it must be there exactly once.

        Args:
            path: of the file; relative ones begin in the working directory.
            old: the text to be replaced.
            new: the text that replaces it.
        """
        text = self._read(path)
        if text.count(old) != 1:
            raise ValueError(f"the text is {text.count(old)} times in {path}; give one that is there once")
        return self.write_file(path, text.replace(old, new))

    def _read(self, path: str) -> str:
        data = self._place.get(self._absolute(path))
        if data is None:
            raise ValueError(f"there is no file {path}")
        return data.decode(errors="replace")

    def _absolute(self, path: str) -> str:
        return path if path.startswith("/") else f"{self._workdir.rstrip('/')}/{path}"

    def _short(self, text: str) -> str:
        half = self._chars // 2
        cut = len(text) - 2 * half
        return text if cut <= 0 else f"{text[:half]}\n… {cut} characters are left out …\n{text[-half:]}"


def tools_of(shell: Shell) -> dict[str, Callable[..., Any]]:
    return {t.__name__: t for t in (shell.bash, shell.read_file, shell.write_file, shell.edit_file)}


def describe(environment: LoadedEnvironment) -> Description:
    """Reads all tasks, and raises for the first that asks for what there is not."""
    where, args = environment.spec.where, environment.spec.args
    for name in args:
        if name not in ARGS:
            raise EnvironmentSetupError(f"{where}: `args.{name}` is not known{suggest(name, ARGS)}")
    if args.get("engine", "auto") not in ENGINES:
        raise EnvironmentSetupError(f"{where}: `args.engine` is {shown(args['engine'])}; it is {', '.join(ENGINES)}")
    engine = _engine(environment)
    for name, folder in _tasks(environment).items():
        try:
            task = read_task(folder, name)
            if engine is None:
                check_image(task)
        except EnvironmentSetupError as e:
            raise EnvironmentSetupError(f"{where}: {e}") from None
    shell = Shell(None, "/", {}, 0.0, 0)  # type: ignore[arg-type]  # for the schemas of its methods
    tools = [function_tool(t, where) for t in tools_of(shell).values()]
    columns = ("task",) if len(_tasks(environment)) > 1 else ()
    return Description("harbor", {"": json_schemas(tools, where)}, columns=columns)


def drive(environment: LoadedEnvironment, start: Mapping[str, Any], session: ChildSession) -> Outcome:
    args, limit = {**ARGS, **environment.spec.args}, _SHARE * (environment.spec.time_limit_s or _DEFAULT_LIMIT_S)
    try:
        task = task_of(start["row"], _tasks(environment))
        begun = time.monotonic()
        with _place(task, _engine(environment)) as (place, workdir, variables):
            made = time.monotonic()
            seconds = min(float(args["command_s"]), limit)
            shell, counts = Shell(place, workdir, variables, seconds, int(args["output_chars"])), ToolCounts()
            session.begin(as_messages(start["prompt"]), environment.description.tools[""])
            turn = session.turn()
            while turn is not None and (turn.tool_calls or turn.errors) and time.monotonic() < made + task.agent_s:
                turn = session.turn(call_tools(turn, tools_of(shell), session, counts))
            reward, metrics = verify(task, place, workdir, variables, min(task.verifier_s, limit))
    except (BoxError, EnvironmentSetupError) as e:
        raise EnvironmentFault(f"failed: {e}") from e
    return Outcome(reward, metrics={**counts.metrics, "start_s": made - begun, **metrics})


def verify(
    task: Task, place: Place, workdir: str, variables: Mapping[str, str], seconds: float
) -> tuple[float, dict[str, float]]:
    """Puts the tests beside what the agent has left, runs them, and returns the reward that they write."""
    place.put(TESTS, task.tests, instead=True)
    place.put(LOGS, {}, instead=True)
    given = {**variables, **task.verifier_variables}
    ended = place.run(["bash", f"{TESTS}/test.sh"], workdir, given, seconds)
    if ended.timeout:
        what = f"the tests of task '{task.name}' took longer than {seconds:g} s"
        raise EnvironmentFault(f"{what}; raise `environment.time_limit_s`, or the task's `verifier.timeout_sec`")
    try:
        return reward_of(place.get(f"{LOGS}/reward.txt"), place.get(f"{LOGS}/reward.json"))
    except ValueError as e:
        said = ended.output[-200:].strip()
        what = f"got no reward from tests/test.sh of task '{task.name}': {e} in {LOGS}"
        raise EnvironmentFault(f"{what}; it exited with {ended.code}: {said}") from e


@contextmanager
def _place(task: Task, engine: str | None) -> Iterator[tuple[Place, str, Mapping[str, str]]]:
    """Yields where the task is worked on, its working directory, and its variables."""
    if engine is None:
        image = build(task)
        place: Any = Box(image.folder, BoxLimits(task.memory_mb, task.disk_mb))
        workdir, variables = image.workdir, image.variables
    else:
        place = Container(engine, build_image(engine, task), task)
        workdir, variables = place.workdir, {}  # a container has its variables
    try:
        yield place, workdir, variables
    finally:
        place.close()


def _engine(environment: LoadedEnvironment) -> str | None:
    """Returns the engine of containers; None: a box."""
    chosen = environment.spec.args.get("engine", "auto")
    if chosen == "auto":
        if "engine" not in _FOUND:
            _FOUND["engine"] = find_engine()
        return _FOUND["engine"]
    return None if chosen == "box" else str(chosen)


_FOUND: dict[str, str | None] = {}  # what `auto` is here: to ask takes a second


def _tasks(environment: LoadedEnvironment) -> dict[str, Path]:
    return find_tasks(environment.base / environment.target, environment.spec.where)


def rows(folder: Path) -> Iterator[dict[str, Any]]:
    """Yields a row for each task."""
    for name, path in find_tasks(folder, "harbor").items():
        yield {"prompt": read_task(path, name).instruction, "task": name}


ADAPTER = EnvironmentAdapter(describe, drive, lambda target: False, "a folder of tasks `harbor:DIR`", package="harbor")

if __name__ == "__main__":
    for row in rows(Path(sys.argv[1])):
        print(json.dumps(row))
