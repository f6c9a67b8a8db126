"""What `bench/chaos.py` does to a run, and what has to follow from it.

kill                a worker is killed at some moment, or all are: the launcher restarts them
checkpoint cut      the same, and a file of the newest checkpoint is cut short: an older one is resumed
disk full           nothing can be written for seconds: the run goes on
clock set           the wall clock is set forward or back: the run goes on
second owner        the same run is started again: it is refused, and the first one goes on
launcher killed     in mid-run; its workers end, and another launcher is accepted at once
launcher killed early   within seconds of its start, while its workers start
link cut, link half-open         for seconds, both ways or one way: the run goes on
link cut for good, link half-open for good     the run ends by itself on all hosts, and is resumed
"""

import json
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from distflow import cli
from distflow.checkpoint.store import list_checkpoints
from distflow.run_folder import checkpoint_dir

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from hosts import Host, Hosts, why_not
from limits import TimeLimit

# How often in a round.
ROUND = {
    "kill": 6,
    "checkpoint cut": 1,
    "disk full": 2,
    "clock set": 3,
    "second owner": 2,
    "launcher killed": 1,
    "launcher killed early": 1,
    "link cut": 1,
    "link half-open": 1,
    "link cut for good": 1,
    "link half-open for good": 1,
}
MOMENTS = ("actor.generate", "move", "actor.update", "checkpoint", "any")
JUMPS_S = (3600, -3600, 400 * 86400, 0, -7200)
CLOCK = """
import os
import time


def jumping(clock, unit):
    def now():
        try:
            with open(os.environ["CHAOS_CLOCK"]) as file:
                return clock() + int(file.read() or 0) * unit
        except OSError:
            return clock()

    return now


time.time, time.time_ns = jumping(time.time, 1), jumping(time.time_ns, 10**9)
"""
Record = dict[str, Any]
why_no_hosts = why_not


class Storm:
    """Operates a run: starts its launchers, or a worker on each of its hosts, and disturbs them."""

    def __init__(self, config: Path, run: Path, workers: int, steps: int, rng: random.Random) -> None:
        self.config, self.run, self.workers, self.steps, self.rng = config, run, workers, steps, rng
        self.log = run.with_suffix(".log")
        self.done: Counter[str] = Counter()
        self.starts = self.killed_all = 0
        self.moments: Counter[str] = Counter()
        self._jumps = 0
        self._processes: list[subprocess.Popen[Any]] = []  # the launcher, or the workers on hosts
        self._site, self._clock = run.parent / "site", run.parent / "clock"
        self._site.mkdir()
        (self._site / "sitecustomize.py").write_text(CLOCK)

    def weather(self, kinds: Sequence[str]) -> None:
        """Runs to the end, disturbed by these."""
        hosts: Hosts | None = None
        try:
            for i, kind in enumerate(kinds):
                if kind.startswith("link") != (hosts is not None):
                    self._stop()
                    if hosts:
                        hosts.__exit__()
                    hosts = Hosts(2).__enter__() if kind.startswith("link") else None
                if not self._processes:
                    self._start(hosts)
                self._reach(0.85 * self.steps * (i + 0.5) / len(kinds))
                print(f"{i + 1}. step {self.step()}: {kind}", file=sys.stderr, flush=True)
                self._disturb(kind, hosts)
                self.done[kind] += 1
            self._stop()
            self._start()
            self._await_end([0])
        finally:
            for process in self._processes:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            if hosts:
                hosts.__exit__()

    def counts(self) -> dict[str, Any]:
        log = self.log.read_text()
        restarts = [int(n) for n in re.findall(r"restart (\d+) of 3 in", log)]
        return {
            "moments": dict(self.moments),
            "killed_all": self.killed_all,
            "restarts": len(restarts),
            "restarts_in_a_row": max(restarts, default=0),
            "starts": self.starts,
        }

    def step(self) -> int:
        """Returns the last step in the log of the run."""
        with suppress(OSError, ValueError, IndexError):
            return int(json.loads((self.run / "metrics.jsonl").read_text().splitlines()[-1])["step"])
        return 0

    def _reach(self, step: float) -> None:
        self._until(lambda: self.step() >= step, f"on the way to step {step:.0f}")

    # Starting and ending.

    def _start(self, hosts: Hosts | None = None) -> None:
        """Starts a launcher here, or the workers on their hosts as an operator does."""
        self.starts += 1
        command = [sys.executable, "-m", "distflow", "run", str(self.config), f"run_dir={self.run}", "--resume=auto"]
        path = os.pathsep.join(filter(None, [str(self._site), os.environ.get("PYTHONPATH")]))
        env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "CHAOS_CLOCK": str(self._clock)}
        with open(self.log, "ab") as log:
            if hosts is None:
                options: Any = {"start_new_session": True, "stdout": log, "stderr": log}
                self._processes = [subprocess.Popen(command, env=os.environ | env, **options)]
                return
            each = self.workers // len(hosts)
            for rank in range(self.workers):
                host: Host = hosts[rank // each]
                own = {"RANK": rank, "LOCAL_RANK": rank % each, "WORLD_SIZE": self.workers, "LOCAL_WORLD_SIZE": each}
                own |= {"MASTER_ADDR": hosts[0].name, "MASTER_PORT": 29500}
                variables = env | {name: str(value) for name, value in own.items()}
                self._processes.append(host.popen(command, variables, stdout=log, stderr=log))

    def _stop(self) -> None:
        """Asks the run to end, which it does after its step; a worker that is only starting ends at once."""
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
        if self._processes:
            self._await_end([0, 128 + signal.SIGTERM, -signal.SIGTERM])

    def _await_end(self, codes: Sequence[int]) -> None:
        limit = TimeLimit(600)
        while any(p.poll() is None for p in self._processes):
            assert limit.left() > 0, f"the run does not end\n{self._end_of_log()}"
            time.sleep(0.05)
        ended = [p.returncode for p in self._processes]
        self._processes = []
        assert all(code in codes for code in ended) or not codes, f"ended with {ended}\n{self._end_of_log()}"
        assert codes or 0 not in ended, f"ended with {ended} although links were cut\n{self._end_of_log()}"

    def _until(self, condition: Callable[[], object], what: str) -> None:
        limit = TimeLimit(300)
        while not condition():
            ended = [p.poll() for p in self._processes if p.poll() is not None]
            assert not ended, f"{what}: ended with {ended}\n{self._end_of_log()}"
            assert limit.left() > 0, f"{what}: nothing happens any more\n{self._end_of_log()}"
            time.sleep(0.001)

    def _end_of_log(self) -> str:
        return self.log.read_text()[-6000:]

    # Disturbing.

    def _disturb(self, kind: str, hosts: Hosts | None) -> None:
        match kind:
            case "kill" | "checkpoint cut":
                self._kill()
                if kind == "checkpoint cut":
                    self._cut_checkpoint()
            case "disk full":
                self._goes_on(self._fill)
            case "clock set":
                self._jumps += 1
                self._goes_on(lambda: self._clock.write_text(str(JUMPS_S[self._jumps % len(JUMPS_S)])))
            case "second owner":
                self._goes_on(self._refused)
            case "launcher killed":
                self._kill_launcher()
            case "launcher killed early":
                self._kill_launcher()
                time.sleep(self.rng.uniform(0.2, 8))
                self._kill_launcher()
            case _:
                assert hosts
                self._cut(kind, hosts)

    def _records(self) -> list[Record]:
        """Returns the heartbeats of all workers of this host; none unless all of them are running."""
        found: list[Record] = []
        for rank in range(self.workers):
            try:
                record = json.loads((self.run / "workers" / f"{rank}.heartbeat").read_text())
                os.kill(record["pid"], 0)
            except (OSError, ValueError, KeyError):
                return []
            found.append(record)
        return found

    def _running(self) -> list[Record]:
        """Waits until all workers run steps; returns their heartbeats."""
        now: list[Record] = []

        def all_run() -> bool:
            now[:] = self._records()
            return bool(now) and all(int(record["step"]) >= 1 for record in now)

        self._until(all_run, "start of workers")
        return now

    def _kill(self) -> None:
        moment, victim = MOMENTS[sum(self.moments.values()) % len(MOMENTS)], self.rng.randrange(self.workers)
        first, now = self._running()[victim]["step"], [Record()]

        def has_come() -> bool:
            now[:] = self._records()
            # Do not wait for ever for a moment that does not come.
            return bool(now) and (self._is(moment, now[victim]) or now[victim]["step"] > first + 4)

        self._until(has_come, f"kill at {moment}")
        everybody = self.rng.random() < 0.3
        for record in now if everybody else [now[victim]]:
            with suppress(ProcessLookupError):
                os.kill(int(record["pid"]), signal.SIGKILL)
        self.moments[moment] += 1
        self.killed_all += everybody
        self._until(lambda: not self._records(), "end of workers")

    def _is(self, moment: str, record: Mapping[str, Any]) -> bool:
        if moment == "checkpoint":
            return any((self.run / "checkpoints").glob("step_*.part"))
        return moment == "any" or str(record["task"]).startswith(moment)

    def _cut_checkpoint(self) -> None:
        folder = self.run / "checkpoints"
        steps = list_checkpoints(folder)
        if len(steps) > 1:
            path = self.rng.choice(sorted(p for p in checkpoint_dir(folder, steps[0]).rglob("*") if p.is_file()))
            os.truncate(path, path.stat().st_size // 2)

    def _kill_launcher(self) -> None:
        """Ends the launcher so that it can tell nobody; its workers have to notice."""
        (launcher,) = self._processes
        children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
        launcher.kill()
        launcher.wait()
        self._start()  # at once: it is accepted, and those that are left harm nobody
        limit = TimeLimit(60)
        while any(_lives(int(pid)) for pid in children):
            assert limit.left() > 0, f"workers {children} outlive their launcher\n{self._end_of_log()}"
            time.sleep(0.01)

    def _goes_on(self, disturb: Callable[[], object]) -> None:
        """Disturbs; the same workers have to do two further steps."""
        before = [record["pid"] for record in self._running()]
        disturb()
        self._reach(min(self.step() + 2, self.steps))
        now = [record["pid"] for record in self._records()]
        assert now == before or self.step() >= self.steps, f"workers were restarted\n{self._end_of_log()}"

    def _fill(self) -> None:
        ballast = self.run / "ballast"
        with suppress(OSError), open(ballast, "wb") as file:
            while True:
                file.write(bytes(1 << 16))
                file.flush()
        time.sleep(self.rng.uniform(1, 4))
        ballast.unlink(missing_ok=True)

    def _refused(self) -> None:
        """Starts it in a fork, which is there soon; the run takes its time meanwhile, so as not to be over."""
        said, slowly = self.run.with_suffix(".refused"), self.run.parent / "slowly"
        slowly.touch()
        words = ["run", str(self.config), f"run_dir={self.run}"]
        second = multiprocessing.get_context("fork").Process(target=_command, args=(words, said))
        second.start()
        second.join()
        slowly.unlink()
        assert second.exitcode == 2, f"a second run was accepted\n{said.read_text()}"
        assert "another run is writing to" in said.read_text(), said.read_text()

    def _cut(self, kind: str, hosts: Hosts) -> None:
        self._reach(self.step() + 1)
        cut = hosts[1].cut if kind.startswith("link cut") else lambda: hosts[0].lose([hosts[1]])
        mend = hosts[1].mend if kind.startswith("link cut") else hosts[0].lose_nothing
        cut()
        if kind.endswith("for good"):
            self._await_end([])
            mend()
            self._start(hosts)
        else:
            time.sleep(self.rng.uniform(1, 4))
            mend()
            self._reach(min(self.step() + 2, self.steps))


def _command(words: list[str], said: Path) -> None:
    for fd in (1, 2):
        os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND), fd)
    cli.main(words)


def _lives(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False
