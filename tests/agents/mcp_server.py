"""A server of the Model Context Protocol with a state, and with the faults that such servers have."""

import os
import sys
import time

from mcp.server import MCPServer

server = MCPServer("counter")
value = 0


@server.tool()
def add(amount: int) -> str:
    """Adds to the counter."""
    global value
    value += amount
    return f"now at {value}"


@server.tool()
def fail() -> str:
    """Raises."""
    raise ValueError("no luck")


@server.tool()
def crash() -> str:
    """Ends the server."""
    os._exit(3)


@server.tool()
def hang() -> str:
    """Never answers."""
    time.sleep(600)
    return "late"


if __name__ == "__main__":
    if "garbage" in sys.argv:
        print("this is no JSON", flush=True)
        sys.stdin.read()
    elif "http" in sys.argv:
        server.run("streamable-http", port=int(sys.argv[-1]))
    else:
        server.run("stdio")
