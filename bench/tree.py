"""A command and everything it starts: run to the end, with CPU seconds as they were spent, and nothing left behind."""

import os
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

_TICK = os.sysconf("SC_CLK_TCK")
Key = tuple[int, int]  # process id and start time: ids are used again


@dataclass
class Ran:
    code: int | None  # None: took too long
    output: str
    spent: list[tuple[float, float]] = field(default_factory=list)  # time of day, CPU seconds of all processes so far

    def cpu_between(self, begin: float, end: float) -> float | None:
        """CPU seconds of the whole tree between two times of day."""
        if not self.spent or begin < self.spent[0][0] or end > self.spent[-1][0]:
            return None
        return self._at(end) - self._at(begin)

    def _at(self, when: float) -> float:
        for (t0, c0), (t1, c1) in zip(self.spent, self.spent[1:], strict=False):
            if t0 <= when <= t1:
                return c0 + (c1 - c0) * (when - t0) / max(t1 - t0, 1e-9)
        return self.spent[-1][1]


def run(command: list[str], env: dict[str, str], folder: Path, limit_s: float, look_s: float = 0.25) -> Ran:
    log = folder / "output.log"
    cpu: dict[Key, float] = {}
    spent = []
    with open(log, "wb") as out:
        process = subprocess.Popen(command, env=env, cwd=folder, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        began = time.monotonic()
        try:
            while process.poll() is None and time.monotonic() - began < limit_s:
                _look(process.pid, cpu)
                spent.append((time.time(), sum(cpu.values())))
                time.sleep(look_s)
            code = process.poll()
        finally:
            _look(process.pid, cpu)
            _end(cpu)
            process.wait()
    return Ran(code, log.read_text(errors="replace"), spent)


def _look(root: int, cpu: dict[Key, float]) -> None:
    """CPU seconds of `root`, what it has started, and what these have; known ones stay known."""
    processes: dict[int, tuple[int, int, float]] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and (found := _stat(int(entry.name))):
            processes[int(entry.name)] = found
    mine = {pid for pid, start in cpu if pid in processes and processes[pid][1] == start}
    mine |= {root} & set(processes)
    more = mine
    while more:
        more = {pid for pid, (parent, _, _) in processes.items() if parent in more} - mine
        mine |= more
    for pid in mine:
        cpu[pid, processes[pid][1]] = processes[pid][2]


def _stat(pid: int) -> tuple[int, int, float] | None:
    """Parent, start time and CPU seconds; None when it has ended, waited for or not."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if words[0] == "Z" else (int(words[1]), int(words[19]), (int(words[11]) + int(words[12])) / _TICK)


def _end(known: dict[Key, float]) -> None:
    """By their ids, those of ours that are still there: politely, then not."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        for pid, start in known:
            if (found := _stat(pid)) and found[1] == start:
                with suppress(ProcessLookupError):
                    os.kill(pid, how)
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline and any((s := _stat(p)) and s[1] == start for p, start in known):
            time.sleep(0.1)
