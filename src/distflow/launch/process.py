"""One worker process, from its environment to its exit code. Needs only the standard rendezvous variables."""

import ctypes
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

import torch

from distflow.errors import ConfigError, DistflowError, StoppedError, cut
from distflow.observe.failures import Failure
from distflow.observe.heartbeat import Heartbeat
from distflow.observe.watchdog import Watchdog
from distflow.run.job import Job
from distflow.run.network import LAUNCHER_STORE
from distflow.run.program import Program
from distflow.run.run_dir import AUTO, make_dir

logger = logging.getLogger(__name__)
STOPPED = 128 + signal.SIGTERM  # exit code


def run_worker(program: Program, resume: str | None = None) -> int:
    """Runs worker RANK of WORLD_SIZE until the run is over; `resume` is what `--resume` names."""
    config = program.config
    rank, workers = _int_from_env("RANK"), _int_from_env("WORLD_SIZE")
    if not 0 <= rank < workers:
        raise ConfigError(f"RANK is {rank} and WORLD_SIZE {workers}; a rank is one of 0 to WORLD_SIZE - 1")
    _prepare_process(workers)
    stop_requested = _handle_sigterm(config.stop_limit_s)
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0:  # torchrun has restarted the workers
        resume = resume or AUTO
        if rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            logger.warning("if restarted workers hang, set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun")
    folder = config.run_folder / "workers"
    make_dir(folder)
    for old in (folder / f"{rank}.error", folder / f"{rank}.stack", folder / "alarm"):
        old.unlink(missing_ok=True)

    def report(error: BaseException) -> None:
        failure = Failure.of(error, rank, heartbeat.record.step)
        written = failure.write(folder)
        if LAUNCHER_STORE not in os.environ or not written:
            logger.error(failure.message)

    def end_stuck(error: DistflowError) -> NoReturn:
        # At once: the main thread may be inside a collective that never returns.
        if isinstance(error, StoppedError):
            os._exit(STOPPED)
        report(error)
        os._exit(1)

    heartbeat = Heartbeat(folder, rank)
    try:
        if config.workers not in (None, workers):
            raise ConfigError(f"workers: {config.workers}, but {workers} were started; set workers={workers}")
        plan = program.plan(workers)
        watchdog = Watchdog(heartbeat, workers, config.wait_limit_s, end_stuck, stop_requested, _local_ranks(rank))
        watchdog.start()
        job = Job(program, plan, rank, heartbeat, resume, stop_requested)
        exit_code = 0
        try:
            job.run()
        except StoppedError as e:
            if rank == 0:
                logger.warning(e)
            exit_code = STOPPED
        job.close()
        watchdog.stop()
        return exit_code
    except Exception as e:
        report(e)
        # No cleanup: it would wait for peers, which see from the exit that this worker is gone.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _int_from_env(name: str) -> int:
    text = os.environ[name]
    try:
        return int(text)
    except ValueError:
        raise ConfigError(
            f"{name} in the environment is '{cut(text)}', which is not a number; set or unset it"
        ) from None


def _local_ranks(rank: int) -> range:
    """Returns the ranks of this host, as far as the environment says."""
    if not {"LOCAL_RANK", "LOCAL_WORLD_SIZE"} <= os.environ.keys():
        return range(rank, rank + 1)
    first = rank - _int_from_env("LOCAL_RANK")
    return range(first, first + _int_from_env("LOCAL_WORLD_SIZE"))


def _handle_sigterm(limit_s: float) -> Callable[[], bool]:
    """Makes SIGTERM ask for an end after the step, and ends the process if that takes longer than `limit_s`."""
    requested = threading.Event()

    def handle(*_: object) -> None:
        if not requested.is_set():
            requested.set()
            timer = threading.Timer(limit_s, os._exit, (STOPPED,))
            timer.daemon = True
            timer.start()

    signal.signal(signal.SIGTERM, handle)
    return requested.is_set


def _prepare_process(workers: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a worker at once, without N tracebacks
    if LAUNCHER_STORE in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: never outlive the launcher
    if "OMP_NUM_THREADS" not in os.environ:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", workers))
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // local))
    keep_freed_memory()


def keep_freed_memory() -> None:
    """Keeps freed memory in the process. Large tensors come and go with every layer; if their pages went back to the
    system, clearing them again would cost some percent of a step."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD, its maximum
        libc.mallopt(-1, -1)  # M_TRIM_THRESHOLD: never
