"""Servers of the Model Context Protocol: the tools that they list are the model's.

Each conversation has a connection of its own, and of a server that is a program also a process of its own.
"""

import asyncio
import contextlib
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from typing import Any

from distflow.agents.adapters.tools import Tool
from distflow.agents.child import EnvironmentFault
from distflow.agents.spec import EnvironmentSetupError, EnvironmentSpec
from distflow.errors import cut
from distflow.util.extras import how_to_install

_INSTALL = f"install it: {how_to_install('mcp')}, or set `environment.python` to where it is installed"
_SHARE = 0.8  # of the time that the environment has: so a server that takes longer can be named
_DEFAULT_S = 30.0
_CLOSE_S = 1.0


def check_installed(spec: EnvironmentSpec) -> None:
    """Imports the client, for all conversations; raises if it is not there."""
    try:
        import mcp

        _ = mcp.Client
    except (ImportError, AttributeError):
        raise EnvironmentSetupError(f"{spec.where}: `mcp` needs the package mcp, version 2; {_INSTALL}") from None


@contextlib.contextmanager
def connect(spec: EnvironmentSpec) -> Iterator[list[Tool]]:
    """Connects to all servers of an environment, and yields their tools; an error becomes an EnvironmentFault."""
    limit_s = _SHARE * (spec.time_limit_s or _DEFAULT_S)
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(_Connection(name, s, limit_s)) for name, s in spec.mcp.items()]
        yield [tool for server in servers for tool in server.tools()]


class _Connection:
    """A connection with a thread of its own: its streams belong to one task, and calls come from several."""

    def __init__(self, name: str, server: Mapping[str, Any], limit_s: float) -> None:
        self._where, self._server, self._limit_s = f"its MCP server '{name}'", server, limit_s
        self._opened: Future[Any] = Future()  # a client
        self._closing: asyncio.Event | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name=name, daemon=True)

    def __enter__(self) -> "_Connection":
        self._thread.start()
        try:
            self._client = self._opened.result(self._limit_s)
        except Exception as e:
            raise self._fault(e) from e
        return self

    def __exit__(self, error: Any, *_: Any) -> None:
        """Closes the connection, unless the server may hang: then it ends with this process."""
        if error is None and self._closing is not None:
            self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join(_CLOSE_S)

    def tools(self) -> list[Tool]:
        tools: list[Any] = []
        page, last = None, False
        while not last:
            listed = self._submit(self._client.list_tools(cursor=page)).result()
            tools, page = [*tools, *listed.tools], listed.next_cursor
            last = page is None
        return [Tool(t.name, self._caller(t.name), _schema(t)) for t in tools]

    def _caller(self, tool: str) -> Callable[..., Awaitable[str]]:
        async def call(**arguments: Any) -> str:
            result = await asyncio.wrap_future(self._submit(self._client.call_tool(tool, arguments)))
            text = "\n".join(getattr(block, "text", None) or f"[{block.type}]" for block in result.content)
            if result.is_error:
                raise ValueError(text)  # which the model is told
            return text

        return call

    def _submit(self, request: Coroutine[Any, Any, Any]) -> "Future[Any]":
        async def answer() -> Any:
            from mcp import MCPError
            from mcp.types import CONNECTION_CLOSED, REQUEST_TIMEOUT

            try:
                return await request
            except MCPError as e:
                if e.code in (CONNECTION_CLOSED, REQUEST_TIMEOUT):
                    raise self._fault(TimeoutError() if e.code == REQUEST_TIMEOUT else e) from e
                raise  # it refuses the arguments: the model is told
            except Exception as e:
                raise self._fault(e) from e

        return asyncio.run_coroutine_threadsafe(answer(), self._loop)

    def _fault(self, error: BaseException) -> EnvironmentFault:
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, TimeoutError):
            reason = f"waited longer than {self._limit_s:g} s for {self._where}"
            return EnvironmentFault(f"{reason}; raise `environment.time_limit_s` if it needs more time")
        return EnvironmentFault(f"had trouble with {self._where}: {type(error).__name__}: {cut(str(error), 200)}")

    async def _serve(self) -> None:
        from mcp import Client, StdioServerParameters

        command = list(self._server["command"])
        program = StdioServerParameters(command=command[0], args=command[1:], env=dict(os.environ)) if command else None
        self._loop, self._closing = asyncio.get_running_loop(), asyncio.Event()
        try:
            async with Client(program or self._server["url"], read_timeout_seconds=self._limit_s) as client:
                self._opened.set_result(client)
                await self._closing.wait()
        except BaseException as e:
            if not self._opened.done():
                self._opened.set_exception(e)


def _schema(tool: Any) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
    return {"type": "function", "function": function}
