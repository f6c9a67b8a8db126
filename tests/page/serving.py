"""A server of the page for tests, in a thread."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from distflow.page.run_folder import RunFolder
from distflow.page.server import bind, make_app, make_server

TOKEN = "token"


@contextmanager
def serving(*runs: Path, follow: bool = False) -> Iterator[int]:
    """Serves these runs; gives the port; the page is below /TOKEN/."""
    server = make_server(make_app([RunFolder(run) for run in runs], TOKEN, follow))
    sock = bind(0)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield sock.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(10)
        sock.close()
