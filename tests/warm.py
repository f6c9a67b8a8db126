"""Runs `distflow run` as each of N workers, as torchrun does, in forks of a server that has imported everything."""

import os
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path

from forks import fork
from limits import TimeLimit

_GRACE_S = 3.0  # for the other workers after one has failed; torchrun ends them, too


@dataclass(frozen=True)
class Ended:
    codes: list[int]  # exit codes of the workers; −9 for one that was still running after another had failed
    out: str  # of rank 0
    err: str  # of all of them


def distflow_run(
    path: Path,
    *overrides: str,
    workers: int = 1,
    timeout_s: float = 120,
    folder: Path | None = None,
    resume: str | None = None,
    main: Callable[[list[str]], None] | None = None,
    command: str = "run",
) -> Ended:
    """Runs all workers to their end. `folder`: working directory; `resume`: as `--resume`; `main`: instead of `cli`.

    `timeout_s` is that of an idle machine.
    """
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    words = [command, str(path), *overrides, f"workers={workers}", *([f"--resume={resume}"] if resume else [])]
    shared = {
        "WORLD_SIZE": str(workers),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    environments = [shared | {"RANK": str(r), "LOCAL_RANK": str(r)} for r in range(workers)]
    return _run(main or cli_main, words, path.parent / path.stem, environments, timeout_s, folder)


def in_fork(main: Callable[[list[str]], None], *words: str, folder: Path, timeout_s: float = 120) -> Ended:
    """Runs `main(words)` in one process, in `folder`."""
    return _run(main, list(words), folder / "output", [{}], timeout_s, folder)


def cli_main(words: list[str]) -> None:
    from distflow import cli

    cli.main(words)


def _run(
    main: Callable[[list[str]], None],
    words: list[str],
    prefix: Path,
    environments: list[dict[str, str]],
    timeout_s: float,
    folder: Path | None,
) -> Ended:
    outputs = [prefix.with_name(f"{prefix.name}.{r}") for r in range(len(environments))]
    # No daemons: those may not have children, and rewards run in processes of their own.
    workers = [
        fork(_process, main, words, environment, str(output), folder)
        for environment, output in zip(environments, outputs, strict=True)
    ]
    limit, failed = TimeLimit(timeout_s), False
    while (seconds := limit.left()) > 0 and (left := [w.sentinel for w in workers if w.exitcode is None]):
        wait(left, seconds)
        if not failed and any(w.exitcode for w in workers):
            failed, limit = True, TimeLimit(_GRACE_S)
    stuck = [r for r, w in enumerate(workers) if w.exitcode is None and not failed]
    for w in workers:
        w.kill()
        w.join()
    err = "".join(Path(f"{o}.err").read_text() for o in outputs)
    assert not stuck, f"ranks {stuck} of {len(workers)} did not end in {limit}\n{err}"
    return Ended([w.exitcode or 0 for w in workers], Path(f"{outputs[0]}.out").read_text(), err)


def _process(
    main: Callable[[list[str]], None], words: list[str], environment: dict[str, str], output: str, folder: Path | None
) -> None:
    import torch

    for fd, suffix in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{output}.{suffix}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), fd)
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
