"""Serves the page of some runs, on loopback only: whoever may read the run's folder may look, nobody may write.

Only GET, only a fixed set of files and requests: no path of the file system is ever part of a request. The Host header
must be a name of this machine, so that no page of the web can be pointed here (DNS rebinding).
"""

import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING

from distflow.errors import ConfigError
from distflow.page.api import Api, RequestError
from distflow.page.assets import INSTALL, files
from distflow.page.run_folder import RunFolder

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

LOOPBACK, NAMES = "127.0.0.1", ["127.0.0.1", "localhost"]
PORT = 8265  # tried first, so that a page that is open finds its server again
TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css"}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
    " img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def make_app(runs: Sequence[RunFolder], follow: bool = False) -> "Starlette":
    """Returns the application that answers for these runs."""
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

    return Starlette(
        routes=[Route("/", asset), Route("/api/{word}", answer), Route("/{name}", asset)],
        middleware=[
            Middleware(TrustedHostMiddleware, allowed_hosts=NAMES),
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
    app = make_app(runs, follow)
    try:
        import uvicorn
    except ImportError:
        raise ConfigError(f"the server uvicorn is not installed; {INSTALL}") from None
    sock = bind(port)
    address = f"http://localhost:{sock.getsockname()[1]}/"
    print(f"{', '.join(str(r.path) for r in runs)}: {address} (Ctrl-C to stop)", flush=True)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
    server.run(sockets=[sock])
