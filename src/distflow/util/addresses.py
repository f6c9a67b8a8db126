"""Which address of this host others see. Imports no torch."""

import contextlib
import socket


def address_towards(host: str, family: int = socket.AF_UNSPEC) -> str | None:
    """Returns the address that the route to `host` starts from, None if there is no route; nothing is sent."""
    try:
        options = socket.getaddrinfo(host, 9, family, socket.SOCK_DGRAM)
    except OSError:
        return None
    for own_family, kind, protocol, _, address in sorted(options, key=lambda o: o[0] != socket.AF_INET):
        with contextlib.suppress(OSError), socket.socket(own_family, kind, protocol) as s:
            s.connect(address)
            return str(s.getsockname()[0])
    return None
