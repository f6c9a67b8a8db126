"""Start a benchmark's workers: its own file as N processes, or forks of this one, on hosts where that is possible."""

import json
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from hosts import Hosts, why_not
from hosts import load_factor as load_factor


def run_workers(script: str, n: int, *words: str) -> dict[str, Any]:
    """`script --worker FILE …` as N processes of one thread each; the JSON object in FILE."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "row.json"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n)]
        env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        subprocess.run([*torchrun, script, "--worker", str(out), *words], check=True, env=env)
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def fork_workers(n: int, per_host: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 300) -> list[Any]:
    """Returns fn(rank, *args) of N forks: on hosts of `per_host` workers each as root, else all on this one."""
    if why_not() is None:
        with Hosts(max(1, n // per_host)) as hosts:
            return hosts.fork(min(n, per_host), fn, *args, timeout_s=timeout_s)
    with socket.create_server(("127.0.0.1", 0)) as s:
        port = s.getsockname()[1]
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()

    def work(rank: int) -> None:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(n), "LOCAL_WORLD_SIZE": str(n)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        results.put((rank, fn(rank, *args)))

    processes = [context.Process(target=work, args=(rank,), daemon=True) for rank in range(n)]
    for process in processes:
        process.start()
    by_rank = dict(results.get() for _ in range(n))
    for process in processes:
        process.join()
    return [by_rank[rank] for rank in range(n)]
