"""Starts N workers on this machine through torchelastic, reports why they fail, and restarts them if that may help."""

import fcntl
import json
import logging
import math
import os
import signal
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import torch.distributed as dist
from rich.console import Console
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from distflow.config import Config
from distflow.errors import ConfigError
from distflow.observe.failures import Failure, find_cause, why_not_restart
from distflow.observe.heartbeat import LAUNCHER_FOLDER
from distflow.run.launch_env import LAUNCHER_STORE
from distflow.run.run_dir import AUTO, make_dir

logger = logging.getLogger(__name__)
MAX_DELAY_S = 30.0  # between two attempts


def launch(config: Config, path: str, overrides: Sequence[str], resume: str | None = None) -> int:
    """Runs the config to the end and returns the exit code. Logs the one cause of each failure."""
    workers = config.workers or 1
    lock = _lock(config.run_folder)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # for numpy: a worker has threads of its own
    # All peers are here: stay off the network. The store of torchelastic listens on all interfaces, so it gets a file
    # instead, and the workers use a store of ours.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    # Workers end by themselves within the limit; torchelastic then kills those that are left.
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(math.ceil(config.stop_limit_s) + 2)
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    _silence_torchelastic()
    command = ["-u", "-m", "distflow", "run", path, *overrides, f"workers={workers}"]
    try:
        return _run_with_restarts(config, command, resume)
    except SignalException as e:
        logger.warning("stopped by %s", signal.Signals(e.sigval).name)
        return 128 + e.sigval
    finally:
        lock.close()
        Console().show_cursor()  # a worker that was killed has not shown it again


def _run_with_restarts(config: Config, command: Sequence[str], resume: str | None) -> int:
    checkpoints, previous, furthest, restart = _NewCheckpoints(config.run_folder), None, -1, 0
    while (failure := _run_workers(config, command, resume)) is not None:
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


def _run_workers(config: Config, command: Sequence[str], resume: str | None) -> Failure | None:
    """Runs all workers until they end; returns why, if they failed."""
    workers, link = config.workers or 1, config.run_folder / "workers"
    store = _store()  # lives as long as the workers
    os.environ[LAUNCHER_STORE] = f"{store.host}:{store.port}"
    # Not in the run's folder, which may be on a network, or full: torchelastic would wait for its own file for ever.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="distflow-", dir=memory) as temporary, _linked(link, temporary):
        folder = Path(temporary)
        os.environ[LAUNCHER_FOLDER] = temporary
        agent = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=workers,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint=f"{temporary}/store",
            rdzv_configs={"store_type": "file"},
            local_addr="127.0.0.1",
            max_restarts=0,
        )
        try:
            elastic_launch(agent, sys.executable)(*command, *([f"--resume={resume}"] if resume else []))
        except ChildFailedError as e:
            return find_cause(folder, e.failures)
    return None


@contextmanager
def _linked(link: Path, folder: str) -> Iterator[None]:
    """Shows the folder of the workers' records in that of the run, where users look for them."""
    with suppress(OSError):
        link.unlink(missing_ok=True)
        link.symlink_to(folder)
    yield
    with suppress(OSError):
        link.unlink()


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


def _store() -> dist.TCPStore:
    """Opens the store where workers meet; it cannot be reached from outside this machine."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
        # By default it would listen on every interface.
        return dist.TCPStore(
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=os.dup(listener.fileno())
        )


def _lock(folder: Path) -> BinaryIO:
    """Locks the run's folder until the file is closed, or this process ends: two runs would overwrite each other."""
    make_dir(folder)
    lock = open(folder / "lock", "wb")  # noqa: SIM115
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"another run is writing to {folder}; wait for it, or choose another run_dir") from None
    return lock


def _silence_torchelastic() -> None:
    """Silences its loggers, each of which has a level of its own: they log every signal, and we log the cause."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
