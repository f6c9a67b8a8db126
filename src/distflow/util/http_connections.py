"""Connections of an HTTP server that any user of the machine may open: strangers are bounded, and give way."""

import asyncio


def bounded_connection(most: int, silent_s: float) -> "type[asyncio.Protocol]":
    """Returns uvicorn's protocol with at most so many connections, and so many seconds until the first request.

    Where all places are taken, a new connection takes that of the oldest stranger: of one for which no request has
    called `request.state.trust()`, as the server does once it has seen a key. Strangers never keep out a client
    with a key.
    """
    from uvicorn.protocols.http.h11_impl import H11Protocol

    strangers: dict[H11Protocol, None] = {}  # oldest first

    class BoundedConnection(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            if len(self.connections) >= most:
                oldest = next(iter(strangers), None)
                if oldest is None:
                    transport.abort()
                    return
                del strangers[oldest]
                oldest.transport.abort()
            super().connection_made(transport)
            strangers[self] = None
            self.app_state = {"trust": self._trust}  # what a request finds as its state
            self.loop.call_later(silent_s, self._close_if_silent)

        def connection_lost(self, exc: Exception | None) -> None:
            strangers.pop(self, None)
            if self in self.connections:
                super().connection_lost(exc)

        def _trust(self) -> None:
            strangers.pop(self, None)

        def _close_if_silent(self) -> None:
            if getattr(self, "cycle", None) is None and not self.transport.is_closing():
                self.transport.close()

    return BoundedConnection
