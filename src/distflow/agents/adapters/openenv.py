"""Clients of OpenEnv servers: `reset` and `step(action)`, or tools that the server lists (MCP).

An action with one required field is what the model writes; one with several is a tool `step` with these parameters.
"""

import inspect
import json
from collections.abc import Mapping
from typing import Any, get_args

from distflow.agents.adapter import EnvironmentAdapter, LoadedEnvironment
from distflow.agents.adapters.looks import derives_from
from distflow.agents.adapters.tools import ToolCounts, call_tools
from distflow.agents.child import ChildSession, EnvironmentFault, Outcome, numbers_of
from distflow.agents.rows import as_messages, with_observation
from distflow.agents.session import AssistantMessage
from distflow.agents.spec import Description, EnvironmentSetupError
from distflow.errors import cut, describe_error

_NOT_SAID = ("reward", "done", "metadata")  # fields of an observation that the model is not told
_OWN = ("metadata",)  # fields that every action has


def describe(environment: LoadedEnvironment) -> Description:
    """Asks the server for its tools, if it has any: it has to run before training starts."""
    spec, target = environment.spec, environment.target
    if "base_url" not in spec.args:
        raise EnvironmentSetupError(f"{spec.where}: which server? Set `environment.args.base_url`, as of its client")
    if _lists_tools(target):
        try:
            with _connect(environment) as client:
                tools = [_tool_schema(t.name, t.description, t.input_schema) for t in client.list_tools()]
        except Exception as e:
            raise EnvironmentSetupError(
                f"{spec.where}: no server answers at {spec.args['base_url']}: {describe_error(e)};"
                " start it first, on every host"
            ) from e
        return Description("openenv", {"": tools})
    action = _action_class(environment)
    if len(_fields(action)) == 1:
        return Description("openenv")
    schema = {"type": "object", "properties": action.model_json_schema()["properties"], "required": _fields(action)}
    return Description("openenv", {"": [_tool_schema("step", action.__doc__ or "", schema)]})


def drive(environment: LoadedEnvironment, start: Mapping[str, Any], session: ChildSession) -> Outcome:
    """Plays one episode."""
    with _connect(environment) as client:
        result = session.run(client.reset(**_reset_arguments(start)))
        session.begin(with_observation(as_messages(start["prompt"]), say(result)), environment.description.tools[""])
        return _play(environment, client, session, result)


def _play(environment: LoadedEnvironment, client: Any, session: ChildSession, result: Any) -> Outcome:
    counts, total, lists = ToolCounts(), 0.0, _lists_tools(environment.target)
    action_class = None if lists else _action_class(environment)
    messages: list[dict[str, Any]] = []

    def act(**arguments: Any) -> Any:
        nonlocal result
        result = client.step(action_class(**arguments))  # type: ignore[misc]
        return say(result)

    def call(name: str) -> Any:
        return lambda **arguments: client.call_tool(name, **arguments)

    names = [t["function"]["name"] for t in environment.description.tools[""]]
    tools = {name: call(name) if lists else act for name in names}
    while not result.done and (turn := session.turn(messages)) is not None:
        before = result
        if tools:
            if not turn.tool_calls and not turn.errors:
                break
            messages = call_tools(turn, tools, session, counts)
        else:
            messages = [{"role": "user", "content": _act_by_text(turn, act, action_class, counts)}]
        if result is not before:
            total += session.turn_reward(result.reward or 0.0)
    return Outcome(total, metrics=numbers_of(_fields_of(result).get("metadata")) | counts.metrics, environment=client)


def _act_by_text(turn: AssistantMessage, act: Any, action_class: Any, counts: ToolCounts) -> str:
    """Takes the model's text as the action's only field; if it is none, or the server refuses it, the model is told."""
    (name,) = _fields(action_class)
    counts.calls += 1
    try:
        return str(act(**{name: turn.content.strip()}) or "")
    except (ValueError, RuntimeError) as e:  # pydantic's, and what the server says
        counts.errors += 1
        reasons = [str(part["msg"]) for part in e.errors()] if hasattr(e, "errors") else [str(e)]
        return str({"error": cut("; ".join(reasons), 300)})


def say(result: Any) -> str | None:
    """Returns a result as a message to the model: the fields of its observation, if it has any."""
    observation = getattr(result, "observation", result)
    fields = _fields_of(result)
    if not fields and not hasattr(observation, "__dict__") and not isinstance(observation, Mapping):
        return str(observation)
    told = {k: v for k, v in fields.items() if k not in _NOT_SAID}
    return json.dumps(told, ensure_ascii=False, default=str) if told else None


def _fields_of(result: Any) -> Mapping[str, Any]:
    """Returns the fields of a result's observation; none if it has no fields."""
    observation = getattr(result, "observation", result)
    if hasattr(observation, "model_dump"):
        observation = observation.model_dump(mode="json")
    elif hasattr(observation, "__dict__"):
        observation = vars(observation)
    return observation if isinstance(observation, Mapping) else {}


def _connect(environment: LoadedEnvironment) -> Any:
    client = environment.target(**environment.spec.args)
    return client.sync() if hasattr(client, "sync") else client


def _reset_arguments(start: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `reset_kwargs` of the row, and the seed of the sample unless they have one."""
    given = start["row"].get("reset_kwargs") or {}
    if not isinstance(given, Mapping):
        raise EnvironmentFault("needs a dict in the row's column 'reset_kwargs'")
    return {"seed": start["seed"] % 2**31, **given}


def _lists_tools(target: Any) -> bool:
    return callable(getattr(target, "list_tools", None)) and callable(getattr(target, "call_tool", None))


def _action_class(environment: LoadedEnvironment) -> Any:
    """Finds the class of actions in `EnvClient[Action, Observation, State]`."""
    for cls in inspect.getmro(environment.target):
        for base in getattr(cls, "__orig_bases__", ()):
            if (arguments := get_args(base)) and hasattr(arguments[0], "model_json_schema"):
                return arguments[0]
    raise EnvironmentSetupError(
        f"{environment.spec.where}: its base class does not say what an action is;"
        " derive it from EnvClient[Action, Observation, State]"
    )


def _fields(action: Any) -> list[str]:
    return [n for n, f in action.model_fields.items() if f.is_required() and n not in _OWN]


def _tool_schema(name: str, description: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": dict(parameters)},
    }


ADAPTER = EnvironmentAdapter(
    describe, drive, lambda t: derives_from(t, "EnvClient", "HTTPEnvClient"), "an OpenEnv client"
)
