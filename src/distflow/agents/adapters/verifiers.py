"""Tasksets and environments of verifiers (v1): `call: verifiers:kuhn-poker`, or a class of such a package.

An episode calls the model through the worker's chat endpoint. A row names its task by position (`task`);
`python -m distflow.agents.adapters.verifiers kuhn-poker 64` writes such rows.
"""

import importlib
import itertools
import json
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from distflow.agents.adapters.skyrl import numbers_of
from distflow.agents.child import ChildSession, EnvironmentFault, Result, check_reward
from distflow.agents.loaded import Loaded
from distflow.agents.settings import merge
from distflow.agents.spec import Description, EnvironmentSetupError
from distflow.errors import cut
from distflow.util.extras import how_to_install

try:
    _vf: Any = importlib.import_module("verifiers.v1")
    _loaders: Any = importlib.import_module("verifiers.v1.utils.loaders")
    _agents: Any = importlib.import_module("verifiers.v1.configs.agent")
except ImportError as e:
    raise EnvironmentSetupError(
        f"verifiers is not installed in {sys.executable} ({e}); {how_to_install('verifiers')}, or install it in"
        " a virtual environment of its own and set `environment.python` to its interpreter"
    ) from e

_KEY = "DISTFLOW_API_KEY"
# An agent runs here, and has no tools but its task's, unless `environment.args` say otherwise.
_SEAT = {"runtime": {"type": "subprocess"}, "harness": {"id": "null"}}


def describe(environment: Loaded) -> Description:
    """Makes the environment once, so that a wrong option is an error before training."""
    try:
        make(environment.target, environment.spec.args)
    except Exception as e:
        raise EnvironmentSetupError(
            f"{environment.spec.where}: verifiers cannot make it: {type(e).__name__}: {cut(str(e), 300)}; check its"
            " id and `environment.args`, which are its EnvConfig"
        ) from e
    return Description("verifiers", gives_reward=True, columns=("task",), needs_endpoint=True)


def drive(environment: Loaded, start: Mapping[str, Any], session: ChildSession) -> Result:
    """Runs one episode; the first agent's trace, or that of `args.trained`, has the reward."""
    args = dict(environment.spec.args)
    trained = args.pop("trained", None)
    env = make(environment.target, args)
    task = task_at(env.taskset, start["row"]["task"])
    endpoint = start["session"]
    os.environ[_KEY] = endpoint["api_key"]
    client = _vf.EvalClientConfig(base_url=endpoint["base_url"], api_key_var=_KEY)

    async def run() -> Any:
        async with env.serving():
            return await env.run_episode(task, _vf.ModelContext(endpoint["model"], client))

    episode = session.run(run())
    trained = trained or next(iter(_agents.agent_config_fields(env.config)))
    traces = [t for t in episode.traces if _name(t) in (trained, None, "")] or episode.traces
    if not any(t.num_turns for t in episode.traces):  # such as a harness that cannot be installed
        errors = [*episode.errors, *(e for t in episode.traces for e in t.errors)]
        said = [f"{e.type}: {e.message}" for e in errors[:1]] or ["its agents took no turn"]
        raise EnvironmentFault(f"failed before the first turn: {cut(said[0], 300)}")
    trace = traces[0]
    metrics = {**numbers_of(trace.metrics), "errors": float(len(trace.errors))}
    return Result(check_reward(trace.reward), metrics=metrics, environment=env)


def make(taskset: Any, args: Mapping[str, Any]) -> Any:
    """Returns the `Env` of a taskset, with every agent in a process of this host."""
    taskset = taskset if isinstance(taskset, str) else taskset.__module__.partition(".")[0]
    given = {k: v for k, v in args.items() if k != "trained"}
    config = merge({"taskset": {"id": taskset}}, given)
    seats = list(_agents.agent_config_fields(_loaders.resolve_env_config(dict(config))))
    bundled = _loaders.default_harness_id(taskset) != "bash"
    seat = {k: v for k, v in _SEAT.items() if k != "harness" or not bundled}
    return _loaders.load_environment(_loaders.resolve_env_config(merge(dict.fromkeys(seats, seat), config)))


def task_at(taskset: Any, position: Any) -> Any:
    if not isinstance(position, int):
        raise EnvironmentFault(f"needs a number in the row's column 'task', the task's position; got {position!r}")
    task = next(itertools.islice(iter(taskset), position, None), None)
    if task is None:
        raise EnvironmentFault(f"has no task {position}; its taskset is shorter")
    return task


def rows(taskset: str, size: int, first: int = 0, **args: Any) -> Iterator[dict[str, Any]]:
    """Yields rows for a JSON Lines file; `prompt` is for people, as the episode makes its own."""
    tasks = itertools.islice(iter(make(taskset, args).taskset), first, first + size)
    for position, task in enumerate(tasks, first):
        prompt = task.data.prompt if isinstance(task.data.prompt, str) else ""
        yield {"prompt": prompt or f"{taskset} {position}", "task": position}


def _name(trace: Any) -> str | None:
    name: str | None = getattr(trace.agent, "name", None)
    return name


if __name__ == "__main__":
    for row in rows(sys.argv[1], int(sys.argv[2])):
        print(json.dumps(row))
