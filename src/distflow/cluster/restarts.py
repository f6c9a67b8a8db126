"""Restarts workers from the newest checkpoint after transient failures; independent of the launcher."""

import fcntl
import json
import logging
import shlex
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

from rich.console import Console
from torch.distributed.elastic.multiprocessing.api import SignalException

from distflow.config import Config
from distflow.errors import ConfigError
from distflow.liveness.failures import Failure, why_not_restart
from distflow.run_folder import AUTO, make_dir
from distflow.util.private_folder import open_lock

logger = logging.getLogger(__name__)
MAX_DELAY_S = 30.0  # between two attempts
PRESS_AGAIN = "the workers finish their step and save it; press Ctrl-C again to end them at once"


def run_with_restarts(
    config: Config,
    run_workers: Callable[[str | None], Failure | None],
    resume: str | None = None,
    command: Sequence[str] = ("distflow", "run"),
) -> int:
    """Runs the config to the end and returns the exit code. Logs the one cause of each failure.

    `run_workers(resume)` runs all workers until they end and returns why, if they failed. `command` is how the user has
    started the run; none if by the Python API."""
    lock = _lock(config.run_folder)
    checkpoints = _NewCheckpoints(config.run_folder)
    try:
        return _run(config, run_workers, resume, checkpoints)
    except SignalException as e:
        logger.warning("stopped by %s; %s", signal.Signals(e.sigval).name, _how_to_resume(checkpoints, resume, command))
        return 128 + e.sigval
    finally:
        lock.close()
        Console().show_cursor()  # a worker that was killed has not shown it again


def _run(
    config: Config,
    run_workers: Callable[[str | None], Failure | None],
    resume: str | None,
    checkpoints: "_NewCheckpoints",
) -> int:
    previous, furthest, restart = None, -1, 0
    while (failure := run_workers(resume)) is not None:
        if failure.kind == "stopped":
            raise SignalException(failure.message, signal.SIGTERM)
        logger.error(failure.message)
        newest = checkpoints.newest()
        if newest is not None and newest > furthest:
            furthest, restart = newest, 0  # the run has come further than before: count from the start
        restart += 1
        if not config.restarts:
            return 1
        if reason := why_not_restart(failure, previous, newest):
            if previous:  # the message of a first failure is enough
                logger.error("not restarted: %s", reason)
            return 1
        if restart > config.restarts:
            logger.error("not restarted: %d restarts are used up (restarts)", config.restarts)
            return 1
        delay_s = min(2.0 ** (restart - 1), MAX_DELAY_S)
        start = f"step {newest}" if newest is not None else "where it started" if resume else "the beginning"
        logger.warning("restart %d of %d in %g s, from %s", restart, config.restarts, delay_s, start)
        time.sleep(delay_s)
        if newest is not None:
            resume = AUTO
        previous = failure
    return 0


def workers_option(config: Config) -> list[str]:
    """Returns the option that starts as many workers again."""
    return [] if config.workers is None else [f"--workers={config.workers}"]


def _how_to_resume(checkpoints: "_NewCheckpoints", resume: str | None, command: Sequence[str]) -> str:
    newest = checkpoints.newest()
    if newest is None and resume is None:
        return "no step was saved"
    again = "--resume" if newest is not None else f"--resume={resume}"  # as it was started, if nothing is new
    start = f"from step {newest}" if newest is not None else "from where it started"
    if not command:
        return f"continue {start}: resume='{AUTO}'"
    return f"continue {start}: {shlex.join([*command, again])}"


class _NewCheckpoints:
    """The checkpoints that this run has written; it must not restart from those of an earlier run in its folder."""

    def __init__(self, folder: Path) -> None:
        self._latest = folder / "checkpoints" / "latest"
        self._old = self._written_at()

    def newest(self) -> int | None:
        """Returns the step of the newest one."""
        if self._written_at() in (None, self._old):
            return None
        return int(json.loads(self._latest.read_text())["step"])

    def _written_at(self) -> int | None:
        return self._latest.stat().st_mtime_ns if self._latest.exists() else None


def _lock(folder: Path) -> BinaryIO:
    """Locks the run's folder until the file is closed, or this process ends: two runs would overwrite each other."""
    make_dir(folder)
    try:
        lock = open_lock(folder / ".lock")
    except OSError as e:
        raise ConfigError(f"run_dir: {folder}/.lock cannot be opened: {e.strerror}; remove it") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"another run is writing to {folder}; wait for it, or choose another run_dir") from None
    return lock
