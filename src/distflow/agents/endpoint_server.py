"""The HTTP side of the endpoint: starlette and uvicorn in a thread, on a free port.

What a client can make this process hold is bounded: connections (those without a key give way to others), seconds until
a request and its body have come, bytes of a body. A refusal is sent after a short wait, to throttle floods.
"""

import asyncio
import atexit
import contextlib
import functools
import os
import socket
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distflow.agents.protocols.call import Api, CallError, Json, openai_error
from distflow.agents.protocols.chat import CHAT, COMPLETIONS, GENERATE
from distflow.agents.protocols.messages import COUNT_TOKENS, MESSAGES
from distflow.agents.protocols.responses import RESPONSES
from distflow.errors import ConfigError, cut
from distflow.util.addresses import address_towards
from distflow.util.extras import how_to_install
from distflow.util.http_connections import bounded_connection

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

    from distflow.agents.endpoint import Endpoint

PREFIXES = ("", "/s/{key}")
LOOPBACK, NAMES = "127.0.0.1", ["127.0.0.1", "localhost"]
MAX_BODY = 8 << 20  # bytes
MAX_CONNECTIONS = 512
BODY_S = 30.0  # for a body, and for the first request of a connection
DRAIN_S = 5.0  # for the rest of a body that is refused
REFUSAL_S = 0.05  # before a refusal is sent
INSTALL = f"install it: {how_to_install('agents')}"
APIS = {  # path → API; the second of two that are alike is for clients that append it to the base URL
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETIONS,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
    "/v1/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": COUNT_TOKENS,
    "/v1/v1/messages/count_tokens": COUNT_TOKENS,
    "/inference/v1/generate": GENERATE,
    "/v1/inference/v1/generate": GENERATE,
}


@dataclass(frozen=True)
class Reply:
    """One of: a JSON body, server-sent events, an error."""

    body: Json | None = None
    events: list[bytes] | None = None
    error: CallError | None = None


class ServerThread:
    """Serves an endpoint until `stop`, or until the process ends."""

    def __init__(self, endpoint: "Endpoint", host: str) -> None:
        app = make_app(endpoint, NAMES if host in (LOOPBACK, "localhost") else ["*"])
        try:
            import uvicorn
        except ImportError:
            raise ConfigError(f"the server uvicorn is not installed; {INSTALL}") from None
        self._socket = _listen(host)
        self.url = _url(self._socket)
        self._owner = os.getpid()
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                http=bounded_connection(MAX_CONNECTIONS, BODY_S),
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="error",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=1,
            )
        )
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="endpoint", daemon=True)
        self._thread.start()
        self._ready.wait()
        _LISTENING.add(self)
        atexit.register(self.stop)

    def resolve(self, future: "asyncio.Future[Reply]", reply: Reply) -> None:
        """Sets a reply from another thread."""
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # the server has ended meanwhile
                loop.call_soon_threadsafe(_set, future, reply)

    def stop(self) -> bool:
        """Ends the thread; False if there is none in this process, or if it has ended before."""
        atexit.unregister(self.stop)
        if os.getpid() != self._owner or self._loop is None:
            return False
        self._server.should_exit = True
        self._thread.join()
        self._loop = None
        self._socket.close()
        _LISTENING.discard(self)
        return True

    def forget(self) -> None:
        """Closes the inherited socket in a fork, which would keep the port open without answering."""
        with contextlib.suppress(OSError):
            self._socket.close()

    def _run(self) -> None:
        async def serve() -> None:
            self._loop = asyncio.get_running_loop()
            self._ready.set()
            await self._server.serve(sockets=[self._socket])

        asyncio.run(serve())


_LISTENING: "set[ServerThread]" = set()


def _close_in_fork() -> None:
    for server in list(_LISTENING):
        server.forget()


os.register_at_fork(after_in_child=_close_in_fork)


def _set(future: "asyncio.Future[Reply]", reply: Reply) -> None:
    if not future.done():
        future.set_result(reply)


def _listen(host: str) -> socket.socket:
    sock = None
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        sock = socket.socket(family)
        sock.bind(address)
        sock.listen(256)
    except OSError as e:
        if sock is not None:
            sock.close()
        raise ConfigError(
            f"environment.endpoint_host: {socket.gethostname()} cannot listen on '{cut(host)}': {e.strerror or e}; give"
            " an address of this host, or 0.0.0.0 for all of them"
        ) from None
    return sock


def _url(sock: socket.socket) -> str:
    """Returns a URL of a listening socket that agents elsewhere reach: all addresses are none of them."""
    address, port = sock.getsockname()[:2]
    if address in ("0.0.0.0", "::"):
        documentation, loopback = (
            ("2001:db8::1", "::1") if sock.family == socket.AF_INET6 else ("198.51.100.1", LOOPBACK)
        )
        address = address_towards(documentation) or loopback
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"


def make_app(endpoint: "Endpoint", hosts: list[str]) -> "Starlette":
    try:
        from starlette.applications import Starlette
        from starlette.exceptions import HTTPException
        from starlette.middleware import Middleware
        from starlette.middleware.trustedhost import TrustedHostMiddleware
        from starlette.responses import JSONResponse, StreamingResponse
        from starlette.routing import Route
    except ImportError:
        raise ConfigError(f"the server starlette is not installed; {INSTALL}") from None

    async def refuse(body: _Body, error: CallError, make: Callable[[CallError], Json] = openai_error) -> "Response":
        await body.drain()
        await asyncio.sleep(REFUSAL_S)
        return JSONResponse(make(error), error.status, headers={"Connection": "close"})

    def key_of(request: "Request") -> tuple[str | None, str | None]:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        sent = key.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key")
        return request.path_params.get("key"), sent

    async def models(request: "Request") -> "Response":
        try:
            endpoint.authorize(*key_of(request))
            request.state.trust()
            return JSONResponse(endpoint.models())
        except CallError as e:
            return await refuse(_Body(request), e)

    async def call(request: "Request", api: Api) -> "Response":
        body = _Body(request)
        try:
            session = endpoint.authorize(*key_of(request))
            request.state.trust()
            endpoint.enter(session)
            try:
                future = endpoint.submit(session, api, await body.read())
                reply = await future
            finally:
                endpoint.leave(session)
            if reply.error is not None:
                raise reply.error
        except CallError as e:
            return await refuse(body, e, api.error)
        if reply.events is not None:
            return StreamingResponse(_each(reply.events), media_type="text/event-stream")
        return JSONResponse(reply.body)

    async def other(request: "Request", error: Exception) -> "Response":
        status = error.status_code if isinstance(error, HTTPException) else 500
        reason = f"{request.method} {request.url.path} is not served here"
        return await refuse(_Body(request), CallError(status, reason, None, "not_found"))

    routes = [Route(prefix + "/v1/models", models, methods=["GET"]) for prefix in PREFIXES]
    routes += [
        Route(prefix + path, functools.partial(call, api=api), methods=["POST"])
        for prefix in PREFIXES
        for path, api in APIS.items()
    ]
    check_host = Middleware(TrustedHostMiddleware, allowed_hosts=hosts)
    return Starlette(routes=routes, middleware=[check_host], exception_handlers={HTTPException: other})


class _Body:
    """The body of a request, as it comes. One that is refused is read too, into nothing: else the client fails to send
    it, and never sees why."""

    def __init__(self, request: "Request") -> None:
        self._receive, self._more = request.receive, True
        length = request.headers.get("content-length", "")
        self._length = int(length) if length.isdecimal() and len(length) < 20 else 0

    async def read(self) -> bytes:
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_S):
                while self._more and max(len(body), self._length) <= MAX_BODY:
                    body += await self._next()
        except TimeoutError:
            raise CallError(408, f"the body did not come within {BODY_S:g} s") from None
        if max(len(body), self._length) > MAX_BODY:
            raise CallError(413, f"the body is above {MAX_BODY >> 20} MiB; send a shorter history")
        return bytes(body)

    async def drain(self) -> None:
        dropped = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                while self._more and dropped <= 8 * MAX_BODY:
                    dropped += len(await self._next())

    async def _next(self) -> bytes:
        message = await self._receive()
        self._more = message.get("more_body", False)  # a client that has gone has no more
        chunk: bytes = message.get("body", b"")
        return chunk


async def _each(events: list[bytes]) -> AsyncIterator[bytes]:
    for event in events:
        yield event
