"""Start N workers on this machine through torchelastic, say why if they fail, and start them again if that may help."""

import fcntl
import json
import logging
import math
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import torch.distributed as dist
from rich.console import Console
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from distflow.config import Config
from distflow.errors import ConfigError
from distflow.launch import IF_ANY, RESUME, make_folder
from distflow.launch.failure import Failure, find, hopeless
from distflow.run.network import LAUNCHED

LONGEST_S = 30.0  # between two attempts


def launch(config: Config, path: str, overrides: Sequence[str]) -> int:
    """Run to the end; the exit code. Each failure is told by its one cause, with its rank, step and task."""
    workers = config.workers or 1
    lock = _lock(config.run_folder)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's: a worker has threads of its own
    # All peers are here: stay off the network. The store of torchelastic listens to the whole world, so it is given a
    # file instead, and the workers meet in ours.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    # Workers end by themselves within the limit; torchelastic then kills what is left.
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(math.ceil(config.stop_limit_s) + 2)
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    _silence_torchelastic()
    try:
        return _until_done(config, ["-u", "-m", "distflow", "run", path, *overrides, f"workers={workers}"])
    except SignalException as e:
        _tell(f"stopped by {signal.Signals(e.sigval).name}")
        return 128 + e.sigval
    finally:
        lock.close()
        Console().show_cursor()  # a worker that was killed cannot give it back to the terminal


def _until_done(config: Config, command: Sequence[str]) -> int:
    checkpoints, before, furthest, restart = _Checkpoints(config.run_folder), None, -1, 0
    while (failed := _attempt(config, command)) is not None:
        if failed.kind == "stopped":
            raise SignalException(failed.message, signal.SIGTERM)
        _tell(failed.message)
        newest = checkpoints.newest()
        if newest is not None and newest > furthest:
            furthest, restart = newest, 0  # it came further than ever: the count begins anew
        restart += 1
        if not config.restarts:
            return 1
        if why := hopeless(failed, before, newest):
            if before:  # of the first failure, the message says it all
                _tell(f"not started again: {why}")
            return 1
        if restart > config.restarts:
            _tell(f"not started again: {config.restarts} restarts are used up (restarts)")
            return 1
        wait_s = min(2.0 ** (restart - 1), LONGEST_S)
        start = checkpoints.start if newest is None else f"step {newest}"
        _tell(f"restart {restart} of {config.restarts} in {wait_s:g} s, from {start}")
        time.sleep(wait_s)
        if newest is not None:
            os.environ[RESUME] = IF_ANY
        before = failed
    return 0


def _attempt(config: Config, command: Sequence[str]) -> Failure | None:
    """All workers, from their start to their end."""
    workers, folder = config.workers or 1, config.run_folder / "workers"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    store = _store()  # lives as long as the attempt
    os.environ[LAUNCHED] = f"{store.host}:{store.port}"
    # Not in the run's folder: on a full disk torchelastic would wait for its own file for ever.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="distflow-", dir=memory) as meeting:
        agent = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=workers,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint=f"{meeting}/store",
            rdzv_configs={"store_type": "file"},
            local_addr="127.0.0.1",
            max_restarts=0,
        )
        try:
            elastic_launch(agent, sys.executable)(*command)
        except ChildFailedError as e:
            return find(folder, e.failures)
    return None


class _Checkpoints:
    """Those that this run has written. There may be some of an earlier one, which it must not go on from."""

    def __init__(self, folder: Path) -> None:
        self._pointer = folder / "checkpoints" / "latest"
        self._old = self._written()
        self.start = "where it began" if RESUME in os.environ else "the beginning"

    def newest(self) -> int | None:
        """The step that it is of."""
        if self._written() in (None, self._old):
            return None
        return int(json.loads(self._pointer.read_text())["step"])

    def _written(self) -> int | None:
        return self._pointer.stat().st_mtime_ns if self._pointer.exists() else None


def _store() -> dist.TCPStore:
    """Where workers find each other; nobody from outside this machine can reach it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
        # Left to itself it would listen on every interface.
        return dist.TCPStore(
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=os.dup(listener.fileno())
        )


def _lock(folder: Path) -> BinaryIO:
    """Held until it is closed, or this process ends: two runs would write over each other."""
    make_folder(folder)
    lock = open(folder / "lock", "wb")  # noqa: SIM115
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"another run is writing to {folder}; wait for it, or choose another run_dir") from None
    return lock


def _silence_torchelastic() -> None:
    """It logs every signal it sends; we tell the cause instead. Each of its loggers has a level of its own."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _tell(text: str) -> None:
    print(f"distflow: {text}", file=sys.stderr, flush=True)
