"""`distflow run` as each of N workers, the way torchrun starts it, in forks of one that has imported everything."""

import multiprocessing
import os
import socket
import sys
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path

import spawn  # noqa: F401 (all tests share one server, and who asks last says what it imports: after spawn, then)

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["distflow.launch.process", "distflow.engine.policy", "transformers.models.qwen2.modeling_qwen2", "pytest"]
)


_GRACE_S = 3.0  # for the others, when one has failed; torchrun ends them, too


@dataclass(frozen=True)
class Ended:
    codes: list[int]  # of the workers; −9 of one that was still there after another had failed
    out: str  # of rank 0
    err: str  # of all of them


def distflow_run(
    path: Path, *overrides: str, workers: int = 1, timeout_s: float = 120, resume: str | None = None
) -> Ended:
    """To the end of all workers; `resume` is where a launcher tells them to go on from."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    says = [path.parent / f"{path.stem}.{r}" for r in range(workers)]
    # No daemons: those may not have children, and rewards are processes of their own.
    made = [
        _context.Process(target=_worker, args=(r, workers, port, str(path), overrides, str(says[r]), resume))
        for r in range(workers)
    ]
    for w in made:
        w.start()
    end, failed = time.monotonic() + timeout_s, False
    while time.monotonic() < end and (left := [w.sentinel for w in made if w.exitcode is None]):
        wait(left, end - time.monotonic())
        if not failed and any(w.exitcode for w in made):
            failed, end = True, time.monotonic() + _GRACE_S
    stuck = [r for r, w in enumerate(made) if w.exitcode is None and not failed]
    for w in made:
        w.kill()
        w.join()
    err = "".join(Path(f"{s}.err").read_text() for s in says)
    assert not stuck, f"ranks {stuck} of {workers} did not end\n{err}"
    return Ended([w.exitcode or 0 for w in made], Path(f"{says[0]}.out").read_text(), err)


def _worker(
    rank: int, workers: int, port: int, path: str, overrides: tuple[str, ...], says: str, resume: str | None
) -> None:
    import torch

    from distflow import cli

    for fd, end in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{says}.{end}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), fd)
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(workers),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        **({"DISTFLOW_RESUME": resume} if resume else {}),
    }
    try:
        cli.main(["run", path, *overrides, f"workers={workers}"])
    except SystemExit:
        raise
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        sys.stdout.flush()
