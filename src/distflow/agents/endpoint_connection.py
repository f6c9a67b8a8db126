"""A connection to the endpoint: there is a limited number of them, and a limited time until the first request."""

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

from distflow.agents.endpoint_server import BODY_S, MAX_CONNECTIONS


class Connection(H11Protocol):
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self.connections) >= MAX_CONNECTIONS:
            transport.abort()
            return
        super().connection_made(transport)
        self.loop.call_later(BODY_S, self._close_if_silent)

    def connection_lost(self, exc: Exception | None) -> None:
        if self in self.connections:
            super().connection_lost(exc)

    def _close_if_silent(self) -> None:
        if getattr(self, "cycle", None) is None and not self.transport.is_closing():
            self.transport.close()
