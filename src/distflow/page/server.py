"""Serves the page of some runs, on loopback only; readers need the token in its address, and writing is not possible.

Loopback is open to all users of the machine, so everything is below the token, and a request without it learns nothing.
Only GET, only a fixed set of files and requests: no path of the file system is ever part of a request. The Host header
must be a name of this machine, so that no page of the web can be pointed here (DNS rebinding).
"""

import secrets
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING

from distflow.errors import ConfigError
from distflow.page.api import Api, RequestError
from distflow.page.assets import INSTALL, files
from distflow.page.run_folder import RunFolder
from distflow.util.http_connections import bounded_connection

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Receive, Scope, Send
    from uvicorn import Server

LOOPBACK, NAMES = "127.0.0.1", ["127.0.0.1", "localhost"]
PORT = 8265  # tried first, as it is the one that people forward by ssh
MAX_CONNECTIONS, SILENT_S = 128, 10.0  # seconds until the first request
TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css"}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
    " img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def make_app(runs: Sequence[RunFolder], token: str, follow: bool = False) -> "Starlette":
    """Returns the application that answers for these runs, below `/token/`."""
    try:
        from starlette.applications import Starlette
        from starlette.middleware import Middleware
        from starlette.middleware.gzip import GZipMiddleware
        from starlette.middleware.trustedhost import TrustedHostMiddleware
        from starlette.responses import JSONResponse, Response
        from starlette.routing import Route
    except ImportError:
        raise ConfigError(f"the server starlette is not installed; {INSTALL}") from None

    api, assets = Api(runs, follow), files()

    def asset(request: "Request") -> "Response":
        name = request.path_params.get("name", "index.html")
        if name not in assets:
            return Response("not found", 404, HEADERS)
        kind = TYPES[name.rpartition(".")[2]]
        return Response(assets[name], headers=HEADERS, media_type=f"{kind}; charset=utf-8")

    def answer(request: "Request") -> "Response":
        try:
            return JSONResponse(api.answer(request.path_params["word"], request.query_params), headers=HEADERS)
        except RequestError as e:
            return JSONResponse({"error": str(e)}, 404, headers=HEADERS)

    class OnlyWithToken:
        """Cuts the token from the path; a request without it is refused, whatever it is."""

        def __init__(self, app: "ASGIApp") -> None:
            self.app = app

        async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
            first, slash, rest = scope["path"].removeprefix("/").partition("/")
            if not slash or not secrets.compare_digest(first.encode(), token.encode()):
                text = "the address of this page has a token: open the one that `distflow show` has printed"
                await Response(text, 403, HEADERS | {"Connection": "close"})(scope, receive, send)
                return
            scope["state"]["trust"]()
            await self.app({**scope, "path": f"/{rest}"}, receive, send)

    return Starlette(
        routes=[Route("/", asset), Route("/api/{word}", answer), Route("/{name}", asset)],
        middleware=[
            Middleware(TrustedHostMiddleware, allowed_hosts=NAMES),
            Middleware(OnlyWithToken),
            Middleware(GZipMiddleware, minimum_size=4096),
        ],
    )


def bind(port: int | None) -> socket.socket:
    """Returns a listening socket on loopback, without a port on PORT or any free one."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((LOOPBACK, PORT if port is None else port))
        sock.listen()
    except (OSError, OverflowError) as e:
        sock.close()
        if port is None:
            return bind(0)
        raise ConfigError(f"--port {port}: {getattr(e, 'strerror', None) or e}; give another one, or none") from None
    return sock


def serve(runs: Sequence[RunFolder], port: int | None = None, follow: bool = False) -> None:
    """Serves until Ctrl-C."""
    token = secrets.token_hex(16)
    server = make_server(make_app(runs, token, follow))
    sock = bind(port)
    address = f"http://localhost:{sock.getsockname()[1]}/{token}/"
    print(f"{', '.join(str(r.path) for r in runs)}: {address} (Ctrl-C to stop)", flush=True)
    server.run(sockets=[sock])


def make_server(app: "Starlette") -> "Server":
    try:
        import uvicorn
    except ImportError:
        raise ConfigError(f"the server uvicorn is not installed; {INSTALL}") from None
    connection = bounded_connection(MAX_CONNECTIONS, SILENT_S)
    config = uvicorn.Config(app, http=connection, log_level="error", lifespan="off", ws="none", proxy_headers=False)
    return uvicorn.Server(config)
