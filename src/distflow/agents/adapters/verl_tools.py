"""verl's tools: `@function_tool`, and `BaseTool` with an instance per conversation."""

import inspect
import json
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from distflow.agents.adapters.tools import Response, Tool, function_tool
from distflow.agents.child import EnvironmentFault
from distflow.agents.spec import EnvironmentSetupError
from distflow.errors import describe_error, shown


def as_tools(target: Any, where: str, args: Mapping[str, Any]) -> list[Tool]:
    """Makes tools of a function, an object of verl's, or a list of these."""
    if isinstance(target, list | tuple):
        return [tool for item in target for tool in as_tools(item, where, args)]
    if is_base_tool(target):
        return [base_tool(target, where, args)]
    entry = target if callable(getattr(target, "fn", None)) else _registered(target)
    if entry is not None:
        return [Tool(entry.name, _reading_response(entry.fn), _plain_schema(entry.tool_schema), source=entry)]
    if not callable(target) or inspect.isclass(target):
        raise EnvironmentSetupError(f"{where}: {shown(target, 60)} is no tool; name a function, or a verl BaseTool")
    return [function_tool(target, where)]


def is_base_tool(target: Any) -> bool:
    """Returns whether it is a class or an object with the methods of verl's `BaseTool`."""
    return all(callable(getattr(target, name, None)) for name in ("create", "execute", "release"))


def base_tool(target: Any, where: str, args: Mapping[str, Any]) -> Tool:
    """Makes a tool; a class is constructed with `args.config` and `args.tool_schema`, as verl does."""
    if inspect.isclass(target):
        schema, schemas = args.get("tool_schema"), sys.modules.get("verl.tools.schemas")
        try:
            if schema and schemas:
                schema = schemas.OpenAIFunctionToolSchema.model_validate(schema)
            target = _construct(target, config=dict(args.get("config", {})), tool_schema=schema)
        except Exception as e:
            raise EnvironmentSetupError(
                f"{where}: {target.__name__}(config=…, tool_schema=…) raised {describe_error(e)};"
                " set `args.config` and `args.tool_schema` as in verl's tool config"
            ) from e
    get_schema = getattr(target, "get_openai_tool_schema", None)
    schema = _plain_schema(get_schema() if get_schema else target.tool_schema)
    state = _Instance(target)
    return Tool(str(schema["function"]["name"]), state.execute, schema, state.start, state.finish, target)


def _construct(cls: Any, **arguments: Any) -> Any:
    return cls(**arguments)


class _Instance:
    """A `BaseTool` and the id of its instance for this conversation."""

    def __init__(self, tool: Any) -> None:
        self._tool, self._id = tool, None

    async def start(self, arguments: Mapping[str, Any]) -> None:
        """Passes the arguments as verl does, which is one by one or as `create_kwargs`, depending on its version."""
        parameters = inspect.signature(self._tool.create).parameters.values()
        given = {**arguments, "create_kwargs": dict(arguments)}
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            given = {p.name: given[p.name] for p in parameters if p.name in given}
        created = await self._tool.create(None, **given)
        self._id = created[0] if isinstance(created, tuple) else created

    async def execute(self, **parameters: Any) -> Response:
        return _response(await self._tool.execute(self._id, parameters))

    async def finish(self) -> float:
        reward = await self._tool.calc_reward(self._id) if hasattr(self._tool, "calc_reward") else None
        await self._tool.release(self._id)
        return float(reward or 0.0)


def _response(value: Any) -> Response:
    """Reads a response, or a tuple of response, reward and metrics."""
    if isinstance(value, tuple) and 1 <= len(value) <= 3:
        response, reward, metrics = (*value, None, None)[:3]
        return Response(_said(response), None if reward is None else float(reward), metrics or {})
    return Response(_said(value))


def _said(value: Any) -> Any:
    """Returns what a tool says, as text, or as parts if there are images in it."""
    if hasattr(value, "text") and not isinstance(value, str):  # verl's ToolResponse
        if getattr(value, "video", None):
            raise EnvironmentFault("has a tool that returned a video; images are taken, videos are not")
        images = [{"type": "image", "image": image} for image in getattr(value, "image", None) or ()]
        return [*images, {"type": "text", "text": value.text or ""}] if images else value.text or ""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else str(value)


def _reading_response(function: Callable[..., Any]) -> Callable[..., Awaitable[Response]]:
    async def call(**parameters: Any) -> Response:
        value = function(**parameters)
        return _response(await value if inspect.isawaitable(value) else value)

    return call


def _registered(function: Any) -> Any:
    """Returns what verl's decorator has noted about a function, if it is decorated."""
    entries = getattr(sys.modules.get("verl.tools.function_tool"), "FUNCTION_TOOL_REGISTRY", {})
    return next((e for e in entries.values() if e.fn is function), None)


def _plain_schema(schema: Any) -> dict[str, Any]:
    return dict(schema.model_dump(exclude_none=True) if hasattr(schema, "model_dump") else schema)
