"""Tasksets and environments of verifiers (v1): `call: verifiers:kuhn-poker`, or a class of such a package.

An episode calls the model through the worker's chat endpoint. A row names its task by position (`task`);
`python -m distflow.agents.adapters.verifiers kuhn-poker 64` writes such rows.
"""

import functools
import importlib
import itertools
import json
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from distflow.agents.adapter import EnvironmentAdapter, LoadedEnvironment
from distflow.agents.child import ChildSession, EnvironmentFault, Outcome, check_reward, numbers_of
from distflow.agents.settings import merge
from distflow.agents.spec import Description, EnvironmentSetupError
from distflow.errors import cut, describe_error
from distflow.util.extras import how_to_install

_KEY = "DISTFLOW_API_KEY"
# An agent runs here, and has no tools but its task's, unless `environment.args` say otherwise.
_SEAT = {"runtime": {"type": "subprocess"}, "harness": {"id": "null"}}


@functools.cache
def _modules() -> tuple[Any, Any, Any]:
    """Imports what conversations need of verifiers: the package, its loaders, the configs of its agents."""
    try:
        names = ("", ".utils.loaders", ".configs.agent")
        package, loaders, agents = (importlib.import_module(f"verifiers.v1{name}") for name in names)
    except ImportError as e:
        raise EnvironmentSetupError(
            f"verifiers is not installed in {sys.executable} ({e}); {how_to_install('verifiers')}, or install it in"
            " a virtual environment of its own and set `environment.python` to its interpreter"
        ) from e
    return package, loaders, agents


def describe(environment: LoadedEnvironment) -> Description:
    """Makes the environment once, so that a wrong option is an error before training."""
    try:
        make(environment.target, environment.spec.args)
    except Exception as e:
        raise EnvironmentSetupError(
            f"{environment.spec.where}: verifiers cannot make it: {describe_error(e)}; check its"
            " id and `environment.args`, which are its EnvConfig"
        ) from e
    return Description("verifiers", columns=("task",), needs_endpoint=True)


def drive(environment: LoadedEnvironment, start: Mapping[str, Any], session: ChildSession) -> Outcome:
    """Runs one episode; the first agent's trace, or that of `args.trained`, has the reward."""
    package, _, agents = _modules()
    args = dict(environment.spec.args)
    trained = args.pop("trained", None)
    env = make(environment.target, args)
    task = task_at(env.taskset, start["row"]["task"])
    endpoint = start["session"]
    os.environ[_KEY] = endpoint["api_key"]
    client = package.EvalClientConfig(base_url=endpoint["base_url"], api_key_var=_KEY)

    async def run() -> Any:
        async with env.serving():
            return await env.run_episode(task, package.ModelContext(endpoint["model"], client))

    episode = session.run(run())
    trained = trained or next(iter(agents.agent_config_fields(env.config)))
    traces = [t for t in episode.traces if _name(t) in (trained, None, "")] or episode.traces
    if not any(t.num_turns for t in episode.traces):  # such as a harness that cannot be installed
        errors = [*episode.errors, *(e for t in episode.traces for e in t.errors)]
        said = [f"{e.type}: {e.message}" for e in errors[:1]] or ["its agents took no turn"]
        raise EnvironmentFault(f"failed before the first turn: {cut(said[0], 300)}")
    trace = traces[0]
    metrics = {**numbers_of(trace.metrics), "errors": float(len(trace.errors))}
    return Outcome(check_reward(trace.reward), metrics=metrics, environment=env)


def make(taskset: Any, args: Mapping[str, Any]) -> Any:
    """Returns the `Env` of a taskset, with every agent in a process of this host."""
    _, loaders, agents = _modules()
    taskset = taskset if isinstance(taskset, str) else taskset.__module__.partition(".")[0]
    given = {k: v for k, v in args.items() if k != "trained"}
    config = merge({"taskset": {"id": taskset}}, given)
    seats = list(agents.agent_config_fields(loaders.resolve_env_config(dict(config))))
    bundled = loaders.default_harness_id(taskset) != "bash"
    seat = {k: v for k, v in _SEAT.items() if k != "harness" or not bundled}
    return loaders.load_environment(loaders.resolve_env_config(merge(dict.fromkeys(seats, seat), config)))


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


ADAPTER = EnvironmentAdapter(
    describe,
    drive,
    lambda t: any(c.__module__.startswith("verifiers.") for c in getattr(t, "__mro__", ())),
    "a verifiers taskset or environment",
    package="verifiers",
    prepare=_modules,
)

if __name__ == "__main__":
    for row in rows(sys.argv[1], int(sys.argv[2])):
        print(json.dumps(row))
