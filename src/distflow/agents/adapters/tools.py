"""Tools as the model sees them: a name, a JSON schema, a call."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from distflow.agents.child import ChildSession, EnvironmentFault
from distflow.agents.session import AssistantMessage
from distflow.agents.spec import EnvironmentSetupError
from distflow.agents.tool_calls import ToolCall
from distflow.errors import cut, suggest

_CURE = "write a type hint for every parameter, and a Google docstring with an `Args:` section"


@dataclass
class Tool:
    """`call` returns what the tool says, or a coroutine of it, or a `Response`. A tool with a state per conversation
    has `start`, which is given the row's arguments for it, and `finish`, which returns the state's reward."""

    name: str
    call: Callable[..., Any]
    schema: dict[str, Any] | None = None  # None: as the type hints and the docstring of `call` say
    start: Callable[[Mapping[str, Any]], Awaitable[None]] | None = None
    finish: Callable[[], Awaitable[float]] | None = None
    source: Any = None  # verl's object, for agent loops of verl


@dataclass(frozen=True)
class Response:
    """The reward and metrics that a tool of verl returns beside its text."""

    content: Any
    reward: float | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class ToolCounts:
    """Counts the tool calls of a conversation and their errors."""

    calls: int = 0
    errors: int = 0
    rewards: list[float] = field(default_factory=list)

    @property
    def metrics(self) -> dict[str, float]:
        return {"tool_calls": self.calls, "tool_errors": self.errors}


def function_tool(function: Callable[..., Any], where: str) -> Tool:
    """Makes a tool of a function or a method; an error names what its signature lacks."""
    name = getattr(function, "__name__", type(function).__name__)
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise EnvironmentSetupError(
                f"{where}: tool '{name}' takes {parameter}, which no schema describes; name its parameters"
            )
        if parameter.annotation is parameter.empty:
            raise EnvironmentSetupError(
                f"{where}: tool '{name}': parameter '{parameter.name}' has no type hint; {_CURE}"
            )
    return Tool(name, function)


def json_schemas(tools: Sequence[Tool], where: str) -> list[dict[str, Any]]:
    """Describes tools to the model; an error names the tool whose docstring or hints do not say enough."""
    names = [t.name for t in tools]
    for name in names:
        if names.count(name) > 1:
            raise EnvironmentSetupError(f"{where}: two tools are named '{name}'; rename one of them")
    return [tool.schema or _json_schema(tool, where) for tool in tools]


def _json_schema(tool: Tool, where: str) -> dict[str, Any]:
    try:
        from transformers.utils import get_json_schema
    except ImportError as e:
        raise EnvironmentSetupError(
            f"{where}: tool '{tool.name}' needs transformers in its Python, which describes it to the model: {e}"
        ) from e
    try:
        schema: dict[str, Any] = get_json_schema(tool.call)
    except Exception as e:  # of several kinds, all about the docstring or the hints
        raise EnvironmentSetupError(f"{where}: tool '{tool.name}': {cut(str(e), 300)}; {_CURE}") from e
    return schema


def call_tools(
    turn: AssistantMessage, tools: Mapping[str, Callable[..., Any]], session: ChildSession, counts: ToolCounts
) -> list[Any]:
    """Runs the tool calls of a turn; returns the tool messages. The model is told of exceptions."""
    pending = [(call.name, call.id, _call(call, tools)) for call in turn.tool_calls]
    values = session.run(_gather([value for *_, value in pending]))
    messages, reward = [], 0.0
    for (name, call_id, _), value in zip(pending, values, strict=True):
        counts.calls += 1
        if isinstance(value, Exception):
            counts.errors += 1
            value = {"error": str(value)}
        elif isinstance(value, Response):
            reward += value.reward or 0.0
            value = value.content
        content = value if _is_blocks(value) else str(value)
        messages.append({"role": "tool", "name": name, "tool_call_id": call_id, "content": content})
    for error in turn.errors:  # calls that could not even be parsed
        counts.calls += 1
        counts.errors += 1
        messages.append({"role": "tool", "name": "tool_call", "content": str({"error": error})})
    if reward:
        counts.rewards.append(session.turn_reward(reward))
    return messages


def _is_blocks(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, dict) and "type" in v for v in value)


def _call(call: ToolCall, tools: Mapping[str, Callable[..., Any]]) -> Any:
    try:
        if call.name not in tools:
            raise ValueError(f"there is no tool '{cut(call.name)}'{suggest(call.name, tools)}")
        return tools[call.name](**call.arguments)
    except EnvironmentFault:
        raise
    except Exception as e:
        return e


async def _gather(values: Sequence[Any]) -> list[Any]:
    async def one(value: Any) -> Any:
        try:
            return await value if inspect.isawaitable(value) else value
        except EnvironmentFault:
            raise
        except Exception as e:
            return e

    return await asyncio.gather(*map(one, values))
