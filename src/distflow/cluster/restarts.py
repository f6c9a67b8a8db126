"""Restarts workers from the newest checkpoint after transient failures; independent of the launcher."""

import json
import logging
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from distflow.cluster.stop_request import StopRequest
from distflow.config import Config
from distflow.liveness.failures import Failure, why_not_restart
from distflow.run_folder import AUTO, CHECKPOINTS, LATEST, make_dir
from distflow.util.owner import Owner

logger = logging.getLogger(__name__)
MAX_DELAY_S = 30.0  # between two attempts
SHOW_CURSOR = "\x1b[?25h"
PRESS_AGAIN = "the workers finish their step and save it; press Ctrl-C again to end them at once"


def run_with_restarts(
    config: Config,
    run_workers: Callable[[str | None, str], Failure | None],
    stop: StopRequest,
    resume: str | None = None,
    again: Sequence[str] = (),
) -> int:
    """Runs the config to the end and returns the exit code. Logs the one cause of each failure.

    `run_workers(resume, owner)` runs all workers until they end, or `stop` is requested, and returns why, if they
    failed. `again`: the words that start the run again, none for the Python API.
    """
    make_dir(config.run_folder)
    try:
        with Owner(config.run_folder, stop.end) as owner:
            return _run(config, lambda resume: run_workers(resume, owner.token), stop, resume, again)
    finally:
        if sys.stdout.isatty():
            print(SHOW_CURSOR, end="", flush=True)  # a worker that was killed has not shown it again


def _run(
    config: Config,
    run_workers: Callable[[str | None], Failure | None],
    stop: StopRequest,
    resume: str | None,
    again: Sequence[str],
) -> int:
    checkpoints = _NewCheckpoints(config.run_folder)
    previous, furthest, restart = None, -1, 0
    while (failure := run_workers(resume)) is not None:
        if failure.kind == "died" and stop.is_requested():  # a worker that was ended, or had not yet begun
            failure = Failure("stopped", "")
        if failure.kind != "stopped":
            logger.error(failure.message)
        if stop.reason:
            logger.error(stop.reason)
            return 1
        newest = checkpoints.newest()
        if newest is not None and newest > furthest:
            furthest, restart = newest, 0  # the run has come further than before: count from the start
        restart += 1
        if failure.kind != "stopped" and not stop.is_requested():
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
            stop.sleep(delay_s)
        if failure.kind == "stopped" or stop.is_requested():
            number = stop.signal or signal.SIGTERM
            logger.warning("stopped by %s; %s", number.name, _how_to_resume(checkpoints, resume, again))
            return 128 + number
        if newest is not None:
            resume = AUTO
        previous = failure
    return 0


def _how_to_resume(checkpoints: "_NewCheckpoints", resume: str | None, again: Sequence[str]) -> str:
    newest = checkpoints.newest()
    if newest is None and resume is None:
        return "no step was saved"
    option = "--resume" if newest is not None else f"--resume={resume}"  # as it was started, if nothing is new
    start = f"from step {newest}" if newest is not None else "from where it started"
    if not again:
        return f"continue {start}: resume='{AUTO}'"
    return f"continue {start}: {shlex.join([*again, option])}"


class _NewCheckpoints:
    """The checkpoints that this run has written. It must not restart from one of an earlier run in its folder."""

    def __init__(self, folder: Path) -> None:
        self._latest = folder / CHECKPOINTS / LATEST
        self._old = self._written_at()

    def newest(self) -> int | None:
        """Returns the step of the newest one."""
        if self._written_at() in (None, self._old):
            return None
        return int(json.loads(self._latest.read_text())["step"])

    def _written_at(self) -> int | None:
        return self._latest.stat().st_mtime_ns if self._latest.exists() else None
