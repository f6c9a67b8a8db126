"""Finds why a run failed: each worker writes its error, the launcher picks the one cause and decides on a restart."""

import json
import signal
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal, NamedTuple

from distflow.errors import CheckpointError, DistflowError, NodeError, PeerLostError, StuckError
from distflow.liveness.heartbeat import read_record, step_name
from distflow.liveness.watchdog import PACKAGE
from distflow.util.files import write_atomically

Kind = Literal[
    "user_error",  # in the config, flow, placement or data, before the first step
    "node",  # the user's code or data failed in a step
    "checkpoint",  # one could not be written, or a role has a state that cannot be
    "exception",  # anything else that was raised
    "stuck",  # a worker waited too long
    "peer_lost",  # this worker only noticed that another one is gone
    "died",  # a worker ended without reporting why
    "stopped",  # all workers ended because they were asked to
]
TERMINATED = (-signal.SIGTERM, 128 + signal.SIGTERM)  # exit codes of a worker that was asked to end


class Exit(NamedTuple):
    """The end of a worker process, as its launcher sees it."""

    local_rank: int
    exitcode: int
    pid: int


@dataclass(frozen=True)
class Failure:
    """The reason why a worker, or the run, has ended. Two failures are equal if they are the same at the same step."""

    kind: Kind
    message: str
    step: int = -1  # −1: before evaluation and the first one
    rank: int = field(default=-1, compare=False)
    time: float = field(default=0.0, compare=False)

    @classmethod
    def of(cls, error: BaseException, rank: int, step: int) -> "Failure":
        return cls(_kind(error, step), _message(error, rank), step, rank)

    def write(self, folder: Path) -> bool:
        """Writes it for the launcher; False if that fails: the disk may be full, and that the cause."""
        path = folder / f"{self.rank}.error"
        try:
            write_atomically(path, json.dumps(asdict(replace(self, time=time.monotonic()))))
        except OSError:
            return False
        return True


def _kind(error: BaseException, step: int) -> Kind:
    match error:
        case StuckError():
            return "stuck"
        case PeerLostError():
            return "peer_lost"
        case NodeError():
            return "node"
        case CheckpointError() if step >= 0:
            return "checkpoint"
        case DistflowError():
            return "user_error" if step < 0 else "node"
    from distflow.comm.transport import is_peer_lost  # imports torch, which a launcher does not need

    return "peer_lost" if is_peer_lost(error) else "exception"


def _message(error: BaseException, rank: int) -> str:
    """Returns the error with the frames of the user's code if that raised it, with all if it is unexpected."""
    from distflow.comm.transport import is_peer_lost, short_message

    expected = isinstance(error, DistflowError)
    cause = error.__cause__ if expected else error
    if not expected and is_peer_lost(error):
        return f"rank {rank} has lost another worker: {short_message(error)}"
    text = str(error) if expected else f"rank {rank}: {type(error).__name__}: {error}"
    if cause is None or isinstance(error, PeerLostError) or isinstance(cause, DistflowError):
        return text
    frames = traceback.extract_tb(cause.__traceback__)
    if expected:
        frames = traceback.StackSummary.from_list([f for f in frames if not f.filename.startswith(PACKAGE)])
    return text + "\n" + "".join(frames.format()).rstrip()


def read_failures(folder: Path) -> list[Failure]:
    """Returns what the workers wrote: causes first, then stuck waits, then lost peers; each as they came."""
    failures = [Failure(**json.loads(p.read_text())) for p in folder.glob("*.error")]
    order = {"stuck": 1, "peer_lost": 2}
    return sorted(failures, key=lambda f: (order.get(f.kind, 0), f.time))


def find_cause(folder: Path, exits: Mapping[int, Exit]) -> Failure:
    """Returns the one cause, with its rank, step and task."""
    reported = read_failures(folder)
    if reported and reported[0].kind != "peer_lost":
        return reported[0]
    # No worker knows the cause: one died without reporting it. The launcher itself asks the others to end.
    unreported = [e for e in exits.values() if e.local_rank not in {f.rank for f in reported}]
    unreported.sort(key=lambda e: e.exitcode in TERMINATED)
    if not unreported:
        return reported[0]
    if not reported and all(e.exitcode == 128 + signal.SIGTERM for e in unreported):
        return Failure("stopped", "the workers were asked to end")
    dead = unreported[0]
    killed = f"was killed by {signal.Signals(-dead.exitcode).name}" if dead.exitcode < 0 else None
    hint = " (by hand, or by the system for lack of memory)" if dead.exitcode == -signal.SIGKILL else ""
    record = read_record(folder, dead.local_rank)
    where = f" in {step_name(record.step)}, task '{record.task}'" if record else " before it started"
    noticed = "".join(f"\n  noticed by rank {f.rank}: {f.message}" for f in reported[:3])
    ended = f"{killed or f'exited with {dead.exitcode}'}{hint}{where}{noticed}"
    return Failure("died", f"rank {dead.local_rank} (pid {dead.pid}) {ended}", record.step if record else -1)


def why_not_restart(failure: Failure, previous: Failure | None, checkpoint: int | None) -> str | None:
    """Returns why another attempt would fail like this one; None if it may succeed, as after a lost or stuck worker."""
    if failure.kind in ("user_error", "checkpoint"):
        return "it would fail again"
    if failure.kind == "node" and checkpoint is None:
        return "it would fail again, as there is no checkpoint yet"
    if failure.kind in ("node", "exception") and failure == previous:
        return "it failed twice at the same place"
    return None
