"""Agents that call the model by themselves, through the worker's endpoint: programs, functions and coroutines.

A program is started per conversation. It finds OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL in its environment,
and the same of ANTHROPIC, which the usual clients read, and the row as JSON on stdin. The last line that it prints may
be JSON: a number, or an object with `reward` and `metrics`. A function gets what it asks for of `base_url`, `api_key`,
`model`, `row`, `prompt`, `sample_id` and `seed`, and may return the same.
"""

import inspect
import json
import os
import shutil
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping
from typing import IO, Any

from distflow.agents.adapter import EnvironmentAdapter, LoadedEnvironment
from distflow.agents.adapters.looks import accepted, parameters_of, required_parameters
from distflow.agents.child import ChildSession, EnvironmentFault, Outcome, check_reward
from distflow.agents.spec import Description, EnvironmentSetupError
from distflow.errors import shown
from distflow.userproc.server_process import describe_exit

GIVEN = ("base_url", "api_key", "model", "row", "prompt", "sample_id", "seed")
_LINE = 1 << 20  # bytes of the last line of a program's output; more of it is no result
_LOCAL = "127.0.0.1,localhost"


def describe(environment: LoadedEnvironment) -> Description:
    """Raises before the first step if a program is missing, or a function has a parameter that is never given."""
    spec = environment.spec
    if spec.command:
        program = spec.command[0]
        if shutil.which(program, path=_path()) is None and not (environment.base / program).is_file():
            raise EnvironmentSetupError(
                f"{spec.where}: there is no program '{program}', neither in PATH nor in {environment.base}; check"
                " `environment.command`"
            )
        return Description("program", needs_endpoint=True)
    known = {*GIVEN, *spec.args}
    for name in required_parameters(environment.target):
        if name not in known:
            raise EnvironmentSetupError(
                f"{spec.where}: the agent has a parameter '{name}' that nobody gives; it is given"
                f" {', '.join(GIVEN)}, and `environment.args`"
            )
    return Description("program", needs_endpoint=True)


def drive(environment: LoadedEnvironment, start: Mapping[str, Any], session: ChildSession) -> Outcome:
    variables = _variables(start["session"])
    if environment.spec.command:
        return read_result(_run(environment, start, {**os.environ, **variables}))
    os.environ.update(variables)
    given = {name: start.get(name) for name in GIVEN[3:]} | start["session"] | dict(environment.spec.args)
    return read_result(session.run(environment.target(**accepted(environment.target, given))))


def read_result(value: Any) -> Outcome:
    """Reads what an agent returned or printed: nothing, a reward, or an object with `reward` and `metrics`."""
    if not isinstance(value, Mapping):
        return Outcome(None if value is None else check_reward(value))
    reward, metrics = value.get("reward"), value.get("metrics") or {}
    if not isinstance(metrics, Mapping):
        raise EnvironmentFault(f"gave {shown(metrics, 60)} as metrics; give an object of numbers")
    numbers = {str(name): check_reward(number) for name, number in metrics.items()}
    return Outcome(None if reward is None else check_reward(reward), metrics=numbers)


def _run(environment: LoadedEnvironment, start: Mapping[str, Any], variables: dict[str, str]) -> Any:
    """Runs the program to its end; returns the JSON of its last line, None if that is something else."""
    try:
        process = subprocess.Popen(
            list(environment.spec.command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=environment.base,
            env=variables,
        )
    except OSError as e:
        raise EnvironmentFault(f"could not be started: {e}") from None
    assert process.stdin is not None
    assert process.stdout is not None
    writer = threading.Thread(target=_write, args=(process.stdin, json.dumps(start["row"]).encode()), daemon=True)
    writer.start()
    last = _last_line(process.stdout)
    if code := process.wait():
        raise EnvironmentFault(f"{describe_exit(code)}; what it wrote to stderr is in the log of the run")
    try:
        value = json.loads(last)
    except ValueError:
        return None
    return value if isinstance(value, dict | int | float) and not isinstance(value, bool) else None


def _write(pipe: IO[bytes], data: bytes) -> None:
    try:
        with pipe:
            pipe.write(data)
    except BrokenPipeError:
        pass  # a program need not read its row


def _last_line(pipe: IO[bytes]) -> bytes:
    """Reads all output, and prints it to stderr as it comes; holds no more than a line that may be the result."""
    lines: deque[bytes] = deque([b""], maxlen=2)
    while chunk := os.read(pipe.fileno(), 1 << 16):
        sys.stderr.buffer.write(chunk)
        sys.stderr.buffer.flush()
        first, *more = chunk.split(b"\n")
        lines[-1] = (lines[-1] + first)[: _LINE + 1]
        lines.extend(line[: _LINE + 1] for line in more)
    last = lines[-1] or lines[0]  # output ends with a newline, or does not
    return b"" if len(last) > _LINE else last


def _variables(session: Mapping[str, str]) -> dict[str, str]:
    proxies = ",".join(filter(None, [os.environ.get("NO_PROXY") or os.environ.get("no_proxy"), _LOCAL]))
    return {
        "OPENAI_BASE_URL": session["base_url"],
        "OPENAI_API_BASE": session["base_url"],  # the older name, which some libraries read
        "OPENAI_API_KEY": session["api_key"],
        "OPENAI_MODEL": session["model"],
        "ANTHROPIC_BASE_URL": session["base_url"].removesuffix("/v1"),  # to which its clients add the /v1
        "ANTHROPIC_API_KEY": session["api_key"],
        "ANTHROPIC_MODEL": session["model"],
        "NO_PROXY": proxies,
        "no_proxy": proxies,
        "PATH": _path(),
    }


def _path() -> str:
    """Returns PATH with this interpreter first: `python` in a command is the one that DistFlow is installed for."""
    return os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])


def _matches(target: Any) -> bool:
    """Returns whether the object is callable and takes `base_url`."""
    return callable(target) and not inspect.isclass(target) and "base_url" in parameters_of(target)


ADAPTER = EnvironmentAdapter(
    describe, drive, _matches, "an agent `fn(base_url, api_key, row)`", tested_with=("openai", "smolagents")
)
