"""The Ray actor of a worker: runs it as a child process and reports how it ended. Imports no torch."""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from distflow.util.parent import PARENT
from distflow.util.temporary import place_in_memory, remove_leftovers, temporary_folder

PORTS = range(20_000, 30_000)  # above Ray's own, below the range that Linux gives to outgoing connections


@dataclass(frozen=True)
class ActorAddress:
    """The place of an actor."""

    node: str  # Ray's id of it
    host: str
    address: str
    port: int  # a free one


@dataclass(frozen=True)
class End:
    """The end of a worker: its exit code, and the files that it wrote for its launcher."""

    exitcode: int
    pid: int
    files: Mapping[str, bytes]
    at: float  # by the monotonic clock of its host


class WorkerActor:
    """Starts one worker on its node. Two threads: one waits for the worker while the other may stop it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False

    def place(self) -> ActorAddress:
        import ray

        node, address = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
        return ActorAddress(node, socket.gethostname(), address, _port())

    def run(self, command: Sequence[str], folder_variable: str, env: Mapping[str, str], cwd: str) -> End:
        """Runs the worker to its end. Its output is that of the actor, which Ray shows to the launcher."""
        remove_leftovers()
        with temporary_folder(place_in_memory()) as folder:
            environment = os.environ | dict(env) | {folder_variable: str(folder), PARENT: str(os.getpid())}
            self._process = subprocess.Popen([sys.executable, *command], env=environment, cwd=cwd)
            if self._stopped:
                self.stop()
            code = self._process.wait()
            files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
            return End(code, self._process.pid, files, time.monotonic())

    def stop(self) -> None:
        """Asks the worker to end after its step."""
        self._stopped = True
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)


def _port() -> int:
    for port in random.sample(PORTS, 100):
        try:
            socket.create_server(("", port)).close()
        except OSError:
            continue
        return port
    raise OSError(f"no free port among {PORTS.start} to {PORTS.stop} on {socket.gethostname()}")
