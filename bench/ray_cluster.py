"""A Ray cluster over hosts of tests/hosts.py, grown host by host, and a driver there that runs the peers' steps."""

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

from workers import Hosts, load_factor

PORT = 6379
RAY_FOLDER = "/tmp/ray"  # where Ray keeps its sockets: each host has its own
LAST_LINES = 5
SCRIPT = Path(__file__).resolve().parent / "peers" / "steps_over_ray.py"
# Workers that are neither niced nor started in stock; memory that is not watched, as there is enough.
ENV = {
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_worker_niceness": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


class RayCluster:
    """`hosts` have a private /tmp/ray. `python` has Ray, verl and TransferQueue. Ends with the hosts.

    `timeout_s` is for one answer on an idle machine; beside load it is longer, as all is.
    """

    def __init__(self, hosts: Hosts, python: Path, log: Path, timeout_s: float) -> None:
        self.hosts, self.python, self.timeout_s, self.log = hosts, python, timeout_s, log
        self.address = f"{hosts[0].address}:{PORT}"
        self.nodes = 0
        log.write_text("")
        self.grow(1)
        with open(log, "a") as errors:
            command = [str(python), str(SCRIPT), self.address]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors, "text": True}
            self.driver = hosts[0].popen(command, ENV, **pipes)
        self.version = self._answer()["version"]

    def grow(self, nodes: int) -> None:
        """Starts Ray on the next hosts, at once."""
        head = ["--head", f"--port={PORT}", "--include-dashboard=false", f"--object-store-memory={4 << 30}"]
        others = [f"--address={self.address}", f"--object-store-memory={512 << 20}"]
        started = []
        for host in self.hosts[self.nodes : nodes]:
            words = [f"--node-ip-address={host.address}", "--num-cpus=8", *(others if host.index else head)]
            command = [str(self.python.parent / "ray"), "start", "--disable-usage-stats", *words]
            with open(self.log, "a") as output:
                started.append(host.popen(command, ENV, stdout=output, stderr=output))
        for process in started:
            limit_s = self.timeout_s * load_factor()
            try:
                failed = process.wait(limit_s) != 0
            except subprocess.TimeoutExpired:
                failed = True
            if failed:
                raise RuntimeError(
                    f"a Ray node did not start within {limit_s:.0f} s; its last words: {self._last_words()}"
                )
        self.nodes = max(self.nodes, nodes)

    def ask(self, **request: Any) -> list[float]:
        """Returns the seconds of each step."""
        assert self.driver.stdin is not None
        self.driver.stdin.write(json.dumps(request) + "\n")
        self.driver.stdin.flush()
        seconds: list[float] = self._answer()["s"]
        return seconds

    def _answer(self) -> dict[str, Any]:
        assert self.driver.stdout is not None
        previous = signal.signal(signal.SIGALRM, lambda *_: os.killpg(self.driver.pid, signal.SIGKILL))
        limit_s = int(self.timeout_s * load_factor())
        signal.alarm(limit_s)
        try:
            line = self.driver.stdout.readline()
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, previous)
        if not line:
            what = f"the peers' driver has ended, or took over {limit_s} s"
            raise RuntimeError(f"{what}; its last words: {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _last_words(self) -> str:
        """Returns the last lines that Ray or the driver wrote."""
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return " | ".join(lines[-LAST_LINES:]) or "none"
