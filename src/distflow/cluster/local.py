"""Starts N workers on this machine through torchelastic."""

import logging
import math
import os
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from distflow.cluster.launch_env import LAUNCHER_STORE
from distflow.cluster.restarts import PRESS_AGAIN, run_with_restarts
from distflow.config import Config
from distflow.liveness.failures import Failure, find_cause
from distflow.liveness.heartbeat import LAUNCHER_FOLDER, pids
from distflow.run_folder import WORKERS
from distflow.util.patient_files import memory_folder

logger = logging.getLogger(__name__)
# Signals on which torchelastic ends the run. SIGINT is ours; older versions take it as well, and ignore a second one.
_SIGNALS: dict[str, Any] = {"signals_to_handle": "SIGTERM,SIGHUP,SIGQUIT"}


def launch(config: Config, words: Sequence[str], resume: str | None = None, again: Sequence[str] = ()) -> int:
    """Runs the config to the end and returns the exit code. Logs the one cause of each failure.

    `words` after `distflow` start a worker; the words of `again` start the run again, none for the Python API.
    """
    workers = config.workers or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # for numpy: a worker has threads of its own
    # All peers are here: stay off the network. A store of PyTorch that listens obeys whoever connects, so torchelastic
    # and the workers each get a file instead, in a folder that only this user may enter.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    # Workers end by themselves within the limit; torchelastic then kills those that are left.
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(math.ceil(config.stop_limit_s) + 2)
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    _silence_torchelastic()
    command = ["-u", "-m", "distflow", *words, f"workers={workers}"]
    interrupt = _Interrupt()
    with interrupt.handling():
        start = partial(_run_workers, config, command, interrupt)
        return run_with_restarts(config, start, resume, again)


class _Interrupt:
    """Ctrl-C ends the run like SIGTERM, after its step; another one kills the workers."""

    def __init__(self) -> None:
        self.folder: Path | None = None  # with the heartbeats of the workers
        self._count = 0

    @contextmanager
    def handling(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():  # where no signal arrives
            yield
            return
        before = signal.signal(signal.SIGINT, self._handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _handle(self, *_: object) -> None:
        self._count += 1
        if self._count == 1:
            logger.warning(PRESS_AGAIN)
            raise SignalException("interrupted", signal.SIGINT)  # torchelastic passes it on to the workers
        for pid in pids(self.folder) if self.folder else ():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _run_workers(config: Config, command: Sequence[str], interrupt: _Interrupt, resume: str | None) -> Failure | None:
    """Runs all workers until they end; returns why, if they failed."""
    workers, link = config.workers or 1, config.run_folder / WORKERS
    # Not in the run's folder, which may be on a network, or full: torchelastic would wait for its own file for ever.
    memory = memory_folder((1 + workers) << 16)
    with tempfile.TemporaryDirectory(prefix="distflow-", dir=memory) as temporary, _linked(link, temporary):
        folder = interrupt.folder = Path(temporary)
        os.environ[LAUNCHER_FOLDER] = temporary
        os.environ[LAUNCHER_STORE] = f"{temporary}/workers-store"
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
            **(_SIGNALS if hasattr(LaunchConfig, "signals_to_handle") else {}),
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
    try:
        yield
    finally:
        with suppress(OSError):
            link.unlink()


def _silence_torchelastic() -> None:
    """Silences its loggers, each of which has a level of its own: they log every signal, and we log the cause."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
