"""Why an attempt to run failed, in one message, and whether another one may do better."""

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from distflow.observe.failures import Kind, read_reports
from distflow.observe.heartbeat import read

TOLD = (-signal.SIGTERM, 128 + signal.SIGTERM)  # exit codes of a worker that was told to end


@dataclass(frozen=True)
class Failure:
    """`silent`: a worker died without a word; `stopped`: all ended because they were told to."""

    kind: Kind | Literal["silent", "stopped"]
    message: str
    step: int = -1


def find(folder: Path, failures: Mapping[int, ProcessFailure]) -> Failure:
    """The one cause, with its rank, step and task."""
    reports = read_reports(folder)
    if reports and reports[0].kind != "echo":
        return Failure(reports[0].kind, reports[0].message, reports[0].step)
    # Nobody knows the cause: a worker died without a word. torchelastic itself tells the others to end.
    silent = [f for f in failures.values() if f.local_rank not in {r.rank for r in reports}]
    silent.sort(key=lambda f: f.exitcode in TOLD)
    if not silent:
        return Failure("echo", reports[0].message, reports[0].step)
    dead = silent[0]
    if not reports and all(f.exitcode == 128 + signal.SIGTERM for f in silent):
        return Failure("stopped", "the workers were told to end")
    how = (
        f"was killed by {signal.Signals(-dead.exitcode).name}" if dead.exitcode < 0 else f"exited with {dead.exitcode}"
    )
    hint = " (by hand, or by the system for lack of memory)" if dead.exitcode == -signal.SIGKILL else ""
    record = read(folder, dead.local_rank)
    where = f" in step {record.step}, task '{record.task}'" if record else " before it started"
    noticed = "".join(f"\n  noticed by rank {r.rank}: {r.message}" for r in reports[:3])
    message = f"rank {dead.local_rank} (pid {dead.pid}) {how}{hint}{where}{noticed}"
    return Failure("silent", message, record.step if record else -1)


def hopeless(failed: Failure, before: Failure | None, checkpoint: int | None) -> str | None:
    """Why another attempt would end like this one, if it would. A lost, killed or stuck worker may have bad luck."""
    if failed.kind == "mistake":
        return "it would come again"
    if failed.kind == "node" and checkpoint is None:
        return "it would come again, for there is no checkpoint yet"
    if failed.kind in ("node", "cause") and failed == before:
        return "twice at the same place"
    return None
