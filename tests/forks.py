"""The server that the workers of tests are forks of: it has imported everything, and loaded the compiled kernels."""

import multiprocessing
import os
import sys
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["preload"])
Queue = _context.Queue


def fork(fn: Callable[..., None], *args: Any, daemon: bool = False) -> ForkServerProcess:
    """Starts `fn(*args)` in a fork of the server."""
    path = os.environ.get("PYTHONPATH")
    tests = str(Path(__file__).parent)  # pytest tells its own process only where they are
    os.environ["PYTHONPATH"] = os.pathsep.join([tests, *([path] if path else [])])
    try:
        forkserver.ensure_running()
    finally:
        del os.environ["PYTHONPATH"]
        os.environ |= {"PYTHONPATH": path} if path else {}
    process = _context.Process(target=_run, args=(fn, args), daemon=daemon)
    process.start()
    return process


def _run(fn: Callable[..., None], args: tuple[Any, ...]) -> None:
    assert "preload" in sys.modules  # the server goes on without what it could not import
    fn(*args)
