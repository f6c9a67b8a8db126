"""One worker process, from its environment to its exit code."""

import ctypes
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch

from distflow.cluster.launch_env import LaunchEnv
from distflow.cluster.rendezvous import LINGER_S, Rendezvous
from distflow.cluster.world import own_device
from distflow.device.offer import whole_offer
from distflow.device.process import start_limit_s
from distflow.errors import ConfigError, DistflowError, StoppedError
from distflow.liveness.beacon import Beacon
from distflow.liveness.failures import Failure
from distflow.liveness.heartbeat import LAUNCHER_FOLDER, Heartbeat, step_name
from distflow.liveness.watchdog import Watchdog
from distflow.plan import Plan
from distflow.run.choosing import placed
from distflow.run.job import Job
from distflow.run.program import Program
from distflow.run_folder import AUTO, make_dir
from distflow.util.owner import OWNER, RENEW_S, Owner, check_owner
from distflow.util.parent import watch_ancestor
from distflow.util.temporary import remove_leftovers

logger = logging.getLogger(__name__)
STOPPED = 128 + signal.SIGTERM  # exit code
AGAIN_S = 1.0  # between two SIGINTs that are not one, of a terminal and of torchrun
_GIVEN_BY = {
    "torchrun": "TORCHELASTIC_RUN_ID",
    "Slurm": "SLURM_PROCID",
}  # its workers have it
RESTARTED = "restarted"  # key in the store: how many workers know that they were restarted


def run_worker(program: Program, env: LaunchEnv, resume: str | None = None) -> int:
    """Runs one worker until the run is over; `resume` is what `--resume` names."""
    config, rank = program.config, env.rank
    env.export()
    _prepare_process(env)
    folder = Path(os.environ[LAUNCHER_FOLDER]) if LAUNCHER_FOLDER in os.environ else None
    ownership = _Ownership(config.run_folder)

    def report(error: BaseException) -> None:
        failure = Failure.of(error, rank, heartbeat.step)
        if folder is None or not failure.write(folder):
            doing = heartbeat.record
            where = f"rank {rank} on {doing.host}, {step_name(doing.step)}, '{doing.task}': "  # no launcher says it
            named = failure.kind != "peer_lost" or failure.message.startswith("rank ")
            logger.error(failure.message if named else where + failure.message)

    def end_stuck(error: DistflowError) -> NoReturn:
        # At once: the main thread may be inside a collective that never returns.
        if not isinstance(error, StoppedError):
            report(error)
        ownership.release()
        os._exit(STOPPED if isinstance(error, StoppedError) else 1)

    heartbeat = Heartbeat(rank, folder)
    stop_requested = _handle_signals(config.stop_limit_s, heartbeat)
    if (variable := _GIVEN_BY.get(env.launcher, "")) in os.environ:
        gone = f"rank {rank} on {heartbeat.host} ends, as what launched it is gone: {env.launcher}, pid"
        watch_ancestor(variable, lambda pid: end_stuck(DistflowError(f"{gone} {pid}")))
    try:
        heartbeat.start_task(-1, "connect")
        rendezvous, beacon, program, plan = _join(program, env, ownership, lambda why: end_stuck(DistflowError(why)))
        if rendezvous.store.add(RESTARTED, 0) > 0:
            resume = resume or AUTO
        limits = config.wait_limit_s, end_stuck, stop_requested, start_limit_s(own_device().type)
        watchdog = Watchdog(heartbeat, beacon, *limits)
        watchdog.start()
        job = Job(program, plan, rendezvous, heartbeat, resume, stop_requested, ownership.check, ownership.owner)
        exit_code = 0
        try:
            job.run()
        except StoppedError as e:
            if rank == 0:
                logger.warning(e)
            exit_code = STOPPED
        job.close()
        watchdog.stop()
        ownership.release()
        return exit_code
    except Exception as e:
        report(e)
        ownership.release()
        # No cleanup: it would wait for peers, which see from the exit that this worker is gone.
        sys.stdout.flush()
        sys.stderr.flush()
        if heartbeat.step < 0 and env.hosts_store and rank == 0 and env.workers > 1:
            time.sleep(LINGER_S)  # with rank 0 goes the store, in which others still look for their peers
        os._exit(1)


class _Ownership:
    """The run's hold on its folder: the launcher's if that is ours, else one that rank 0 takes for all workers."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._token = folder, os.environ.pop(OWNER, "")
        self._owner: Owner | None = None

    def take(self, rendezvous: Rendezvous, on_lost: Callable[[str], None]) -> None:
        """Raises if another run owns the folder. Rank 0 calls it before the others are told that all is well."""
        if not self._token and rendezvous.rank == 0:
            self._owner = Owner(self._folder, on_lost)
            self._token = self._owner.token
            rendezvous.publish("owner", self._token)

    def learn(self, rendezvous: Rendezvous) -> None:
        self._token = self._token or rendezvous.lookup("owner", 0)

    @property
    def owner(self) -> str:
        """Names who holds the folder; the attempts of one launcher of ours are those of one owner."""
        return self._token.partition(" ")[0]

    def check(self) -> None:
        """Raises if another run has taken the folder, or it was emptied; call it before writing there."""
        check_owner(self._token)

    def release(self) -> None:
        if self._owner:  # in a thread: a worker ends also where a file system hangs
            thread = threading.Thread(target=self._owner.release, daemon=True)
            thread.start()
            thread.join(RENEW_S)


def _join(
    program: Program, env: LaunchEnv, ownership: _Ownership, on_lost: Callable[[str], None]
) -> tuple[Rendezvous, Beacon | None, Program, Plan]:
    """Meets the other workers. Checks all that needs no others first, and tells a failure to the waiting workers."""
    config, workers = program.config, env.workers
    # The watchdog has to report a stuck run first: the store gives up by itself only much later.
    rendezvous = Rendezvous(env, timedelta(seconds=2 * config.wait_limit_s + 60))
    try:
        if config.workers not in (None, workers):
            raise ConfigError(f"workers: {config.workers}, but {workers} were started; set workers={workers}")
        if env.rank == 0:
            program.check_installed()
        device = own_device()  # raises if there is none for this worker
        program, choices = placed(program, workers, whole_offer(device))
        if choices and env.rank == 0:
            logger.info("chosen for the placement: %s", "; ".join(map(str, choices)))
        plan = program.plan(workers)
        make_dir(config.run_folder)
        ownership.take(rendezvous, on_lost)
        beacon = Beacon(env.rank, workers, rendezvous.address) if workers > 1 else None
        if beacon:
            rendezvous.publish("heartbeat", beacon.address)
        # torchrun has restarted the workers. All must know, but it counts per host, and not where it ended them itself.
        if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0:
            rendezvous.store.add(RESTARTED, 1)
    except Exception as e:
        rendezvous.fail(str(e))
        raise
    rendezvous.wait_for_all()
    ownership.learn(rendezvous)
    if beacon:
        beacon.connect(rendezvous.token, lambda r: rendezvous.lookup("heartbeat", r))
    return rendezvous, beacon, program, plan


def _handle_signals(limit_s: float, heartbeat: Heartbeat) -> Callable[[], bool]:
    """Makes SIGTERM and SIGINT ask for an end after the step, and ends the process if that takes longer than `limit_s`,
    and the time that its checkpoint may take.

    A second SIGINT ends it at once; a launcher passes the first one on, so only one that comes later counts as such.
    Before the first step nothing would be lost, and a launcher asks all workers: they end at once.
    """
    launched, requested_at = heartbeat.folder is not None, 0.0
    # Handlers only note: an event, a thread or a log would wait for locks that the interrupted code may hold.
    waiting, request = os.pipe()

    def end_late() -> None:
        os.read(waiting, 1)
        while (left := requested_at + limit_s + heartbeat.write_s - time.monotonic()) > 0:
            time.sleep(min(left, 1.0))  # the last checkpoint says how large it is when it is begun
        os._exit(STOPPED)

    def handle(number: int, _: object) -> None:
        nonlocal requested_at
        if requested_at:
            if number == signal.SIGINT and not launched and time.monotonic() - requested_at > AGAIN_S:
                os._exit(128 + number)
            return
        if launched and heartbeat.step < 1:
            os._exit(STOPPED)
        requested_at = time.monotonic()
        os.write(request, b"!")

    threading.Thread(target=end_late, name="stop limit", daemon=True).start()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle)
    return lambda: requested_at > 0


def _prepare_process(env: LaunchEnv) -> None:
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // (env.local_workers or env.workers)))
    if env.local_rank == 0 and env.launcher != "distflow":  # which does it itself
        remove_leftovers()
    keep_freed_memory()


def keep_freed_memory() -> None:
    """Keeps freed memory in the process. Large tensors come and go with every layer; if their pages went back to the
    system, clearing them again would cost some percent of a step."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD, its maximum
        libc.mallopt(-1, -1)  # M_TRIM_THRESHOLD: never
