"""Environments that go wrong, each in its own way, and one that does not."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


class Good:
    def reset(self, **row: Any) -> str:
        self._n = 0
        return " Count."

    def add(self, step: int) -> int:
        """Adds to the counter.

        Args:
            step: How much to add.
        """
        self._n += step
        return self._n

    def get_reward(self) -> float:
        return float(self._n)


class Bad(Good):
    """Does in `reset`, `add` or `get_reward` (`at`) what the row names (`what`)."""

    def reset(self, **row: Any) -> Any:
        self._row = row
        result = self._misbehave("reset")
        return super().reset() if result is None else result

    def add(self, step: int) -> Any:
        """Adds to the counter.

        Args:
            step: How much to add.
        """
        result = self._misbehave("add")
        return super().add(step) if result is None else result

    def get_reward(self) -> Any:
        result = self._misbehave("get_reward")
        return super().get_reward() if result is None else result

    def _misbehave(self, at: str) -> Any:
        if self._row.get("at") == at:
            return getattr(self, f"_{self._row['what']}")()
        return None

    def _hang(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP})
        while True:
            time.sleep(60)

    def _note_and_hang(self) -> None:
        Path(self._row["note"]).write_text(str(os.getpid()))
        time.sleep(3600)

    def _raise(self) -> None:
        raise RuntimeError("the server is on fire")

    def _leave(self) -> None:
        sys.exit(3)

    def _exit(self) -> None:
        os._exit(7)

    def _crash(self) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)

    def _huge(self) -> str:
        return "x" * 100_000_000

    def _object(self) -> object:
        return object()

    def _nan(self) -> float:
        return float("nan")

    def _garbage(self) -> None:
        os.write(_channel(), b'{"op": "done", "reward": 1e9}\nnot JSON\n')

    def _flood(self) -> None:
        descriptor = _channel()
        while True:
            os.write(descriptor, b"x" * 65536)

    def _flood_rewards(self) -> None:
        descriptor = _channel()
        while True:
            os.write(descriptor, b'{"op": "turn_reward", "branch": 0, "reward": 1}\n')

    def _close(self) -> None:
        os.close(_channel())
        time.sleep(3600)

    def _close_everything(self) -> None:
        os.closerange(3, 256)

    def _fork(self) -> None:
        os.fork()  # both return, and go on

    def _start_processes(self) -> None:
        """Starts one in its own group, one that leaves it, and one whose parent is gone."""
        note = Path(self._row["note"])
        sleep = [sys.executable, "-c", "import time; time.sleep(3600)"]
        own = subprocess.Popen(sleep).pid
        apart = subprocess.Popen(sleep, start_new_session=True).pid
        program = f"import subprocess, sys; print(subprocess.Popen({sleep!r}, start_new_session=True, stdout=2).pid)"
        orphan = int(subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=True).stdout)
        note.write_text(f"{own} {apart} {orphan}")

    def _kill_parent(self) -> None:
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(3600)


def _channel() -> int:
    """The descriptor of the channel: the first socket that is open."""
    for descriptor in range(3, 256):
        try:
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
                return descriptor
        except OSError:
            continue
    raise AssertionError("no channel")


class Chance:
    def reset(self, **row: Any) -> str:
        return f" {random.random()}"


class Elsewhere:
    def reset(self, **row: Any) -> str:
        return f" {os.environ.get('ELSEWHERE')}"
