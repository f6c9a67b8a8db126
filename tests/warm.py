"""`distflow run` as each of N workers, the way torchrun starts it, in forks of one that has imported everything."""

import multiprocessing
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path

import spawn  # noqa: F401 (all tests share one server, and who asks last says what it imports: after spawn, then)

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["distflow.launch.local", "distflow.engine.policy", "warm_kernels", "pytest"])


_GRACE_S = 3.0  # for the others, when one has failed; torchrun ends them, too


@dataclass(frozen=True)
class Ended:
    codes: list[int]  # of the workers; −9 of one that was still there after another had failed
    out: str  # of rank 0
    err: str  # of all of them


def distflow_run(
    path: Path,
    *overrides: str,
    workers: int = 1,
    timeout_s: float = 120,
    folder: Path | None = None,
    resume: str | None = None,
) -> Ended:
    """To the end of all workers; `folder`: where the command is given, `resume`: as a launcher tells them."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    words = ["run", str(path), *overrides, f"workers={workers}"]
    about = {
        "WORLD_SIZE": str(workers),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        **({"DISTFLOW_RESUME": resume} if resume else {}),
    }
    each = [about | {"RANK": str(r), "LOCAL_RANK": str(r)} for r in range(workers)]
    return _ended(cli_main, words, path.parent / path.stem, each, timeout_s, folder)


def in_fork(main: Callable[[list[str]], None], *words: str, folder: Path, timeout_s: float = 120) -> Ended:
    """One process that calls `main(words)` in `folder`."""
    return _ended(main, list(words), folder / "said", [{}], timeout_s, folder)


def cli_main(words: list[str]) -> None:
    from distflow import cli

    cli.main(words)


def _ended(
    main: Callable[[list[str]], None],
    words: list[str],
    prefix: Path,
    environments: list[dict[str, str]],
    timeout_s: float,
    folder: Path | None,
) -> Ended:
    says = [prefix.with_name(f"{prefix.name}.{r}") for r in range(len(environments))]
    # No daemons: those may not have children, and rewards are processes of their own.
    made = [
        _context.Process(target=_process, args=(main, words, environment, str(say), folder))
        for environment, say in zip(environments, says, strict=True)
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
    assert not stuck, f"ranks {stuck} of {len(made)} did not end\n{err}"
    return Ended([w.exitcode or 0 for w in made], Path(f"{says[0]}.out").read_text(), err)


def _process(
    main: Callable[[list[str]], None], words: list[str], environment: dict[str, str], says: str, folder: Path | None
) -> None:
    import torch

    for fd, end in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{says}.{end}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), fd)
    torch.set_num_threads(1)
    os.environ |= {"OMP_NUM_THREADS": "1", **environment}
    if folder:
        os.chdir(folder)
    try:
        main(words)
    except SystemExit:
        raise
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        sys.stdout.flush()
