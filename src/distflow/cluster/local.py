"""Starts N workers on this machine, and waits until they have ended. Imports no torch."""

import logging
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from distflow.cluster.launch_env import LAUNCHER_STORE
from distflow.cluster.restarts import PRESS_AGAIN, run_with_restarts
from distflow.cluster.stop_request import StopRequest
from distflow.config import Config
from distflow.errors import ConfigError
from distflow.liveness.failures import Exit, Failure, find_cause
from distflow.liveness.heartbeat import LAUNCHER_FOLDER, read_record
from distflow.run_folder import WORKERS
from distflow.util.owner import OWNER
from distflow.util.parent import PARENT
from distflow.util.temporary import place_in_memory, remove_leftovers, temporary_folder

logger = logging.getLogger(__name__)
POLL_S = 0.05
GRACE_S = 30.0  # in which the others end after a worker has failed


def launch(config: Config, words: Sequence[str], resume: str | None = None, again: Sequence[str] = ()) -> int:
    """Runs the config to the end and returns the exit code. Logs the one cause of each failure.

    `words` after `distflow` start a worker; the words of `again` start the run again, none for the Python API.
    """
    command = [sys.executable, "-u", "-m", "distflow", *words, f"workers={config.workers or 1}"]
    remove_leftovers()
    stop = StopRequest()
    with stop.handling():
        return run_with_restarts(config, partial(_run_workers, config, command, stop), stop, resume, again)


def _run_workers(
    config: Config, command: Sequence[str], stop: StopRequest, resume: str | None, owner: str
) -> Failure | None:
    """Runs all workers until they end; returns why, if they failed. `owner`: proves that the run's folder is theirs."""
    workers, link = config.workers or 1, config.run_folder / WORKERS
    # Not in the run's folder, which may be on a network, or full.
    with temporary_folder(place_in_memory((1 + workers) << 16)) as folder, _linked(link, folder):
        # All peers are here: stay off the network. A store of PyTorch that listens obeys any client, so the
        # workers get a file instead, in a folder that only this user may enter.
        defaults = {
            "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // workers)),
            "OPENBLAS_NUM_THREADS": "1",  # for numpy: a worker has threads of its own
            "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        }
        own = {
            "WORLD_SIZE": str(workers),
            "LOCAL_WORLD_SIZE": str(workers),
            LAUNCHER_FOLDER: str(folder),
            LAUNCHER_STORE: f"{folder}/workers-store",
            OWNER: owner,
            PARENT: str(os.getpid()),
        }
        command = [*command, *([f"--resume={resume}"] if resume else [])]
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(workers):
                ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                processes.append(_start(command, defaults | os.environ | own | ranks))
            exits = _wait(processes, stop, lambda: math.ceil(config.stop_limit_s + _write_s(folder, workers)) + 2)
        except OSError as e:
            raise ConfigError(
                f"worker {len(processes)} cannot be started: {e.strerror}; free memory or processes"
            ) from e
        finally:
            _kill(processes)
        return find_cause(folder, exits) if exits else None


def _start(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    # In a session of its own: Ctrl-C in a terminal is for the launcher, which passes it on.
    return subprocess.Popen(command, env=environment, start_new_session=True)


def _write_s(folder: Path, workers: int) -> float:
    """Returns how long the workers' parts of a checkpoint may take to be written."""
    records = (read_record(folder, rank) for rank in range(workers))
    return max((record.write_s for record in records if record), default=0.0)


def _wait(
    processes: Sequence[subprocess.Popen[bytes]], stop: StopRequest, stop_limit_s: Callable[[], float]
) -> Mapping[int, Exit]:
    """Returns once all have ended: the exit of the first that failed, or of all if the run was to stop."""
    exits: Mapping[int, Exit] = {}
    deadline = math.inf
    asked_at = math.inf
    while any(p.poll() is None for p in processes):
        failed = _failed(processes)
        if stop.is_requested() and asked_at == math.inf:
            asked_at = time.monotonic()
            if stop.signal == signal.SIGINT:
                logger.warning(PRESS_AGAIN)
            _send(processes, signal.SIGTERM)
        elif failed and not exits:
            exits, deadline = failed, min(deadline, time.monotonic() + GRACE_S)
            _send(processes, signal.SIGTERM)
        now = time.monotonic()
        if stop.at_once or now > deadline or (now > asked_at and now > asked_at + stop_limit_s()):
            _kill(processes)
            continue
        time.sleep(POLL_S)
    return exits or _failed(processes)


def _failed(processes: Sequence[subprocess.Popen[bytes]]) -> Mapping[int, Exit]:
    return {rank: Exit(rank, code, p.pid) for rank, p in enumerate(processes) if (code := p.poll())}


def _kill(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    _send(processes, signal.SIGKILL)
    for process in processes:
        process.wait()


def _send(processes: Sequence[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    """Sends a signal to running workers, and to processes that they have started."""
    for process in processes:
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)


@contextmanager
def _linked(link: Path, folder: Path) -> Iterator[None]:
    """Shows the folder of the workers' records in that of the run, where users look for them."""
    with suppress(OSError):
        link.unlink(missing_ok=True)
        link.symlink_to(folder)
    try:
        yield
    finally:
        with suppress(OSError):
            link.unlink()
