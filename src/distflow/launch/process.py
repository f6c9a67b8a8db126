"""One worker process, from its environment to its exit code. Needs only the standard rendezvous variables."""

import ctypes
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from typing import NoReturn

import torch

from distflow.data.transport import lost
from distflow.errors import ConfigError, DistflowError, NodeError, PeerLostError, StoppedError, StuckError, cut
from distflow.launch import IF_ANY, RESUME, make_folder
from distflow.observe.failures import Kind, Report
from distflow.observe.heartbeat import Heartbeat
from distflow.observe.watchdog import PACKAGE, Watchdog
from distflow.run.job import Job
from distflow.run.network import LAUNCHED
from distflow.run.program import Program

STOPPED = 128 + signal.SIGTERM


def run_worker(program: Program) -> int:
    """Be worker RANK of WORLD_SIZE until the run is over."""
    config = program.config
    rank, workers = _told("RANK"), _told("WORLD_SIZE")
    if not 0 <= rank < workers:
        raise ConfigError(f"RANK is {rank} and WORLD_SIZE {workers}; a rank is one of 0 to WORLD_SIZE - 1")
    _prepare_process(workers)
    told_to_stop = _until_told(config.stop_limit_s)
    again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    resume = os.environ.get(RESUME) or (IF_ANY if again else None)
    folder = config.run_folder / "workers"
    make_folder(folder)
    for old in (folder / f"{rank}.error", folder / f"{rank}.stack", folder / "alarm"):
        old.unlink(missing_ok=True)

    def fail(error: BaseException) -> None:
        step, message = heartbeat.record.step, explain(error, rank)
        saved = Report(rank, kind_of(error, step), message, step).save(folder)
        if LAUNCHED not in os.environ or not saved:
            print(f"distflow: {message}", file=sys.stderr, flush=True)

    def end_stuck(error: DistflowError) -> NoReturn:
        # At once: the main thread may be inside a collective that will never return.
        if isinstance(error, StoppedError):
            os._exit(STOPPED)
        fail(error)
        os._exit(1)

    heartbeat = Heartbeat(folder, rank)
    try:
        if config.workers not in (None, workers):
            raise ConfigError(f"workers: {config.workers}, but {workers} were started; set workers={workers}")
        plan = program.plan(workers)
        watch = Watchdog(heartbeat, workers, config.wait_limit_s, end_stuck, told_to_stop, _beside(rank))
        watch.start()
        job = Job(program, plan, rank, heartbeat, resume, told_to_stop)
        try:
            job.run()
        except StoppedError as e:
            if rank == 0:
                print(f"distflow: {e}", file=sys.stderr, flush=True)
            job.close()
            watch.stop()
            return STOPPED
        job.close()
        watch.stop()
        return 0
    except Exception as e:
        fail(e)
        # No clean-up: it would wait for peers. The exit itself tells them.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _told(name: str) -> int:
    """By whoever has started us."""
    text = os.environ[name]
    try:
        return int(text)
    except ValueError:
        raise ConfigError(
            f"{name} in the environment is '{cut(text)}', which is not a number; set or unset it"
        ) from None


def _beside(rank: int) -> range:
    """Ranks of this host, as far as we are told."""
    if not {"LOCAL_RANK", "LOCAL_WORLD_SIZE"} <= os.environ.keys():
        return range(rank, rank + 1)
    first = rank - _told("LOCAL_RANK")
    return range(first, first + _told("LOCAL_WORLD_SIZE"))


def _until_told(limit_s: float) -> Callable[[], bool]:
    """SIGTERM asks to end after the step; whoever has not ended by then is ended, and the last checkpoint counts."""
    told = threading.Event()

    def end(*_: object) -> None:
        if not told.is_set():
            told.set()
            timer = threading.Timer(limit_s, os._exit, (STOPPED,))
            timer.daemon = True
            timer.start()

    signal.signal(signal.SIGTERM, end)
    return told.is_set


def _prepare_process(workers: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a worker at once, without N tracebacks
    if LAUNCHED in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: never outlive the launcher
    if "OMP_NUM_THREADS" not in os.environ:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", workers))
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // local))
    keep_freed_memory()


def keep_freed_memory() -> None:
    """Large tensors come and go with every layer. By default their pages go back to the system each time, and coming
    back they have to be cleared: some percent of a step."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD, the highest there is
        libc.mallopt(-1, -1)  # M_TRIM_THRESHOLD: never


def kind_of(error: BaseException, step: int) -> Kind:
    """What a failure tells about starting again; `step` is −1 before the first one."""
    match error:
        case StuckError():
            return "stuck"
        case PeerLostError():
            return "echo"
        case NodeError():
            return "node"
        case DistflowError():
            return "mistake" if step < 0 else "node"
    return "echo" if lost(error) else "cause"


def explain(error: BaseException, rank: int) -> str:
    """The message; with the user's own frames where their code raised, and with all where ours is to blame."""
    cause = error.__cause__ if isinstance(error, DistflowError) else error
    text = str(error) if isinstance(error, DistflowError) else f"rank {rank}: {type(error).__name__}: {error}"
    if cause is None or isinstance(error, PeerLostError) or isinstance(cause, DistflowError):
        return text
    frames = traceback.extract_tb(cause.__traceback__)
    if isinstance(error, DistflowError):
        frames = traceback.StackSummary.from_list([f for f in frames if not f.filename.startswith(PACKAGE)])
    return text + "\n" + "".join(frames.format()).rstrip()
