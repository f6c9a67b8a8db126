"""Runs `distflow run` in a fork that has imported everything, and its workers in forks of that: saves seconds."""

import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from distflow import cli
from distflow.util.parent import end_with_parent
from forks import fork
from limits import TimeLimit
from warm import cli_main


class Launch:
    """A running launcher."""

    def __init__(self, path: Path, *words: str, main: Callable[[list[str]], None] = cli_main) -> None:
        """`main`: runs in the launcher instead of `cli.main`."""
        number = len(list(path.parent.glob("launch*.out")))
        self._outputs = [path.parent / f"launch{number}.{stream}" for stream in ("out", "err")]
        for file in self._outputs:
            file.write_text("")
        self._process = fork(_launcher, main, ["run", str(path), *words], [str(file) for file in self._outputs])
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def out(self) -> str:
        return self._outputs[0].read_text()

    @property
    def err(self) -> str:
        return self._outputs[1].read_text()

    @property
    def has_ended(self) -> bool:
        return self._process.exitcode is not None

    def wait_until(self, condition: Callable[[], Any], limit_s: float = 60) -> None:
        limit = TimeLimit(limit_s)
        while not condition():
            assert self._process.exitcode is None, f"ended with {self._process.exitcode}: {self.out}{self.err}"
            assert limit.left() > 0, f"still waiting after {limit}: {self.out}{self.err}"
            time.sleep(0.01)

    def wait(self, limit_s: float = 60) -> int:
        """Waits for its end and returns the exit code."""
        limit = TimeLimit(limit_s)
        while self._process.exitcode is None and (seconds := limit.left()) > 0:
            self._process.join(seconds)
        code = self._process.exitcode
        if code is None:
            self._process.kill()
            self._process.join()
        assert code is not None, f"did not end in {limit}: {self.out}{self.err}"
        return code


class _Fork:
    """Has what the launcher needs of a Popen."""

    def __init__(self, args: Sequence[str], env: Mapping[str, str]) -> None:
        self.args = args
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            _be_worker(args, env)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = time.monotonic() + (1e9 if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            time.sleep(0.005)
        return code


def _be_worker(args: Sequence[str], env: Mapping[str, str]) -> None:
    """Does what a new process with these arguments would."""
    code: Any = 1
    try:
        os.setsid()
        for sig in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(sig, signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(env)
        end_with_parent()
        sys.argv = list(args)[args.index("distflow") :]
        cli.main(sys.argv[1:])
    except SystemExit as e:
        code = e.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _launcher(main: Callable[[list[str]], None], words: list[str], outputs: list[str]) -> None:
    from distflow.cluster import local

    for fd, name in enumerate(outputs, 1):
        os.dup2(os.open(name, os.O_WRONLY | os.O_APPEND), fd)
    os.environ["OMP_NUM_THREADS"] = "1"
    local._start = _Fork  # type: ignore[assignment]
    main(words)
