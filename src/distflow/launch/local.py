"""Starts N workers on this machine through torchelastic."""

import logging
import math
import os
import socket
import sys
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from distflow.config import Config
from distflow.launch.restarts import run_with_restarts
from distflow.observe.failures import Failure, find_cause
from distflow.observe.heartbeat import LAUNCHER_FOLDER
from distflow.run.launch_env import LAUNCHER_STORE


def launch(config: Config, path: str, overrides: Sequence[str], resume: str | None = None) -> int:
    """Runs the config to the end and returns the exit code. Logs the one cause of each failure."""
    workers = config.workers or 1
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
    return run_with_restarts(config, partial(_run_workers, config, command), resume)


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


def _store() -> dist.TCPStore:
    """Opens the store where workers meet; it cannot be reached from outside this machine."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
        # By default it would listen on every interface.
        return dist.TCPStore(
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=os.dup(listener.fileno())
        )


def _silence_torchelastic() -> None:
    """Silences its loggers, each of which has a level of its own: they log every signal, and we log the cause."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
