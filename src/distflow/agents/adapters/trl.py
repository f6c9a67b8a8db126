"""TRL's `environment_factory` and `tools`: every public method of an environment is a tool of the model."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from distflow.agents.adapter import EnvironmentAdapter, LoadedEnvironment
from distflow.agents.adapters.looks import accepted, has_methods, required_parameters
from distflow.agents.adapters.mcp_tools import connect
from distflow.agents.adapters.tools import Tool, ToolCounts, call_tools, function_tool, json_schemas
from distflow.agents.child import ChildSession, EnvironmentFault, Outcome, check_reward
from distflow.agents.rows import as_messages, with_observation
from distflow.agents.spec import Description, EnvironmentSetupError, EnvironmentSpec
from distflow.errors import describe_error, suggest

_NO_TOOLS = ("reset", "get_reward")


def describe(environment: LoadedEnvironment) -> Description:
    """Reads the methods of the class; only the object of a factory function is made for that."""
    spec, common = environment.spec, [*environment.tools, *_served(environment.spec)]
    if environment.target is None:  # nothing but tools
        return Description("tools", {"": json_schemas(common, spec.where)})
    schemas, columns = {}, set[str]()
    for choice, factory in _factories(environment.target).items():
        where = f"{spec.where}: '{choice}'" if choice else spec.where
        prototype = _prototype(factory, spec.args, where)
        tools = [function_tool(m, where) for m in _methods(prototype)]
        schemas[choice] = json_schemas([*common, *tools], where)
        if len(_factories(environment.target)) == 1:
            columns = set(required_parameters(prototype.reset)) - {"self", "prompt"}
    return Description("trl", schemas, tuple(sorted(columns)))


def drive(environment: LoadedEnvironment, start: Mapping[str, Any], session: ChildSession) -> Outcome:
    """Lets the model call tools until it calls none, or the worker takes no further turn."""
    with connect(environment.spec) as served:
        return _drive(environment, {t.name: t.call for t in [*environment.tools, *served]}, start, session)


def _drive(
    environment: LoadedEnvironment,
    tools: dict[str, Callable[..., Any]],
    start: Mapping[str, Any],
    session: ChildSession,
) -> Outcome:
    row, messages = start["row"], as_messages(start["prompt"])
    choice, env = "", None
    if environment.target is not None:
        factories = _factories(environment.target)
        choice = "" if "" in factories else str(row.get("environment"))
        if choice not in factories:
            raise EnvironmentFault(f"has no environment '{choice}'{suggest(choice, factories)}")
        env = factories[choice](**environment.spec.args)
        tools |= {m.__name__: m for m in _methods(env)}
        given = {k: v for k, v in row.items() if not (choice and k == "environment")}
        observation = session.run(env.reset(**accepted(env.reset, given)))
        messages = with_observation(messages, observation)
    counts = ToolCounts()
    for tool in environment.tools:
        if tool.start:
            session.run(tool.start(_create_arguments(row, tool)))
    session.begin(messages, environment.description.tools[choice])
    turn = session.turn()
    while turn is not None and (turn.tool_calls or turn.errors):
        turn = session.turn(call_tools(turn, tools, session, counts))
    result = Outcome(metrics=counts.metrics, environment=env)
    if any(t.finish for t in environment.tools) or counts.rewards:
        result.reward = sum(counts.rewards) + sum(session.run(t.finish()) for t in environment.tools if t.finish)
    if env is not None and callable(getattr(env, "get_reward", None)):
        result.reward = (result.reward or 0.0) + check_reward(session.run(env.get_reward()))
    return result


def _served(spec: EnvironmentSpec) -> list[Tool]:
    """Returns the tools of the environment's servers, which have to run before training starts."""
    try:
        with connect(spec) as tools:
            return tools
    except EnvironmentFault as e:
        raise EnvironmentSetupError(f"{spec.where}: {e}") from e


def _factories(target: Any) -> Mapping[str, Callable[..., Any]]:
    return {str(k): v for k, v in target.items()} if isinstance(target, Mapping) else {"": target}


def _prototype(factory: Callable[..., Any], args: Mapping[str, Any], where: str) -> Any:
    if inspect.isclass(factory):
        prototype: Any = factory
    else:
        try:
            prototype = factory(**args)
        except Exception as e:
            raise EnvironmentSetupError(
                f"{where}: the factory raised {describe_error(e)}; it has to work with nothing but `environment.args`"
            ) from e
    if not callable(getattr(prototype, "reset", None)):
        raise EnvironmentSetupError(f"{where}: has no method `reset`; TRL's environments have `reset(self, **row)`")
    return prototype


def _methods(env: Any) -> Iterator[Any]:
    """Yields the public methods, bound; those of a class are bound to nothing, for their signatures."""
    for name, method in inspect.getmembers(env, inspect.isroutine):
        if name.startswith("_") or name in _NO_TOOLS:
            continue
        static = inspect.getattr_static(env, name)
        if inspect.ismethod(method):
            yield method
        elif inspect.isclass(env) and inspect.isfunction(method) and not isinstance(static, staticmethod):
            yield method.__get__(object())


def _create_arguments(row: Mapping[str, Any], tool: Tool) -> Mapping[str, Any]:
    """Reads the arguments of verl's `create` from the row: `tools_kwargs`, or `extra_info.tools_kwargs`."""
    info = row.get("extra_info")
    given = row.get("tools_kwargs") or (info.get("tools_kwargs") if isinstance(info, Mapping) else None) or {}
    arguments: Mapping[str, Any] = given.get(tool.name, {}).get("create_kwargs", {})
    return arguments


def _is_tools(target: Any) -> bool:
    if isinstance(target, list | tuple):
        return bool(target)
    return has_methods(target, "create", "execute", "release") or hasattr(target, "tool_schema")


def _is_trl(target: Any) -> bool:
    if isinstance(target, dict):
        return bool(target) and all(map(callable, target.values()))
    if inspect.isclass(target) or not callable(target):
        return has_methods(target, "reset")
    return not required_parameters(target)  # a factory: `describe` makes one and looks


ADAPTER = EnvironmentAdapter(
    describe,
    drive,
    _is_trl,
    "a TRL environment (class with `reset` whose public methods are tools, or a dict of such)",
    takes=("tools", "mcp"),
)
TOOLS = EnvironmentAdapter(
    describe, drive, _is_tools, "a list of tools, a verl BaseTool", tested_with=("mcp",), takes=("tools", "mcp")
)
