"""Start N workers on this machine through torchelastic, and say why if they fail."""

import fcntl
import logging
import os
import shutil
import signal
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from rich.console import Console
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from distflow.config import Config
from distflow.errors import ConfigError
from distflow.launch import make_folder
from distflow.launch.process import LAUNCHED
from distflow.observe.board import read_all
from distflow.observe.report import read_reports


def launch(config: Config, path: str, overrides: Sequence[str]) -> int:
    """Run to the end; the exit code. On failure the one cause is printed, with its rank, step and task."""
    workers = config.workers or 1
    folder = config.run_folder / "workers"
    lock = _lock(config.run_folder)
    shutil.rmtree(folder, ignore_errors=True)
    os.environ[LAUNCHED] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))
    # All peers are here: stay off the network.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    _silence_torchelastic()
    agent = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=workers,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
    )
    command = ["-u", "-m", "distflow", "run", path, *overrides, f"workers={workers}"]
    try:
        elastic_launch(agent, sys.executable)(*command)
    except ChildFailedError as e:
        print(f"distflow: {_cause(folder, workers, e.failures)}", file=sys.stderr)
        return 1
    except SignalException as e:
        print(f"distflow: stopped by {signal.Signals(e.sigval).name}", file=sys.stderr)
        return 128 + e.sigval
    finally:
        lock.close()
        Console().show_cursor()  # a worker that was killed cannot give it back to the terminal
    return 0


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


def _cause(folder: Path, workers: int, failures: Mapping[int, ProcessFailure]) -> str:
    reports = read_reports(folder)
    if reports and reports[0].kind != "echo":
        return reports[0].message
    # Nobody knows the cause: a worker died without a word. torchelastic itself ends the others by SIGTERM.
    silent = [f for f in failures.values() if f.local_rank not in {r.rank for r in reports}]
    silent.sort(key=lambda f: f.exitcode == -signal.SIGTERM)
    if not silent:
        return reports[0].message
    dead = silent[0]
    how = (
        f"was killed by {signal.Signals(-dead.exitcode).name}" if dead.exitcode < 0 else f"exited with {dead.exitcode}"
    )
    hint = " (by hand, or by the system for lack of memory)" if dead.exitcode == -signal.SIGKILL else ""
    record = read_all(folder, workers)[dead.local_rank]
    where = f" in step {record.step}, task '{record.task}'" if record else " before it started"
    noticed = "".join(f"\n  noticed by rank {r.rank}: {r.message}" for r in reports[:3])
    return f"rank {dead.local_rank} (pid {dead.pid}) {how}{hint}{where}{noticed}"
