# mypy: ignore-errors
"""The traffic of bench/exchange.py, a private Ray and the clock, for the scripts beside this one; not run by itself."""

import argparse
import ctypes
import json
import os
import re
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import psutil
import torch

SAMPLES, TOKENS, WARM_UP = 1024, 4096, 2
FIELDS = dict.fromkeys(("input_ids", "attention_mask", "position_ids"), torch.int64)
FIELDS |= dict.fromkeys(("old_log_probs", "ref_log_probs", "advantages"), torch.float32)

# Ray must not nice its workers (they would lose the processor to anybody) nor start spare ones while we measure, and
# memory once used stays mapped, because fresh pages in every iteration made the peers slower.
KEEP = {"MMAP_MAX_": (-4, 0), "TRIM_THRESHOLD_": (-1, 2**31 - 1), "ARENA_MAX": (-8, 1)}  # option of mallopt(3), value
SETTINGS = {f"MALLOC_{name}": str(value) for name, (_, value) in KEEP.items()} | {
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_worker_niceness": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_preallocate_plasma_memory": "1",
    "HF_HUB_OFFLINE": "1",
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--iters", type=int, default=9)
    return parser.parse_args()


def before(rank: int, n: int) -> range:
    return range(rank * SAMPLES // n, (rank + 1) * SAMPLES // n)


def after(rank: int, n: int) -> range:
    return range(rank, SAMPLES, n)


def tensors(rows: range) -> dict[str, torch.Tensor]:
    """The fields of these rows, [rows, TOKENS]; every value is the number of its row."""
    ids = torch.tensor(rows)[:, None].expand(-1, TOKENS)
    return {name: ids.to(dtype).contiguous() for name, dtype in FIELDS.items()}


def verify(got: dict[str, torch.Tensor], rank: int, n: int) -> None:
    """Every value of every field: worker `rank` must hold its rows, in order."""
    for name, expected in tensors(after(rank, n)).items():
        if got[name].dtype != expected.dtype or not torch.equal(got[name], expected):
            raise RuntimeError(f"worker {rank} of {n} holds wrong values in {name}")


@contextmanager
def private_ray(n: int, **more: str) -> Iterator[None]:
    """A Ray of our own with these settings, gone with all its processes and files at the end, whatever happens."""
    import ray

    os.environ |= SETTINGS | more
    for option, value in KEEP.values():  # this process is past the point where malloc reads the environment
        ctypes.CDLL(None).mallopt(option, value)
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as tmp:
        try:
            quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
            env = SETTINGS | more | {"OMP_NUM_THREADS": "1"}
            size = {"num_cpus": 4 * n + 8, "num_gpus": 0, "object_store_memory": 3 << 30}  # cpus: as actors ask for
            ray.init(address="local", runtime_env={"env_vars": env}, _temp_dir=tmp, **size, **quiet)
            signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # after Ray has set its own, which aborts
            yield
        finally:
            started = psutil.Process().children(recursive=True)
            ray.shutdown()
            for process in psutil.wait_procs(started, timeout=5)[1]:
                process.kill()
            psutil.wait_procs(started, timeout=5)


def cpu_seconds() -> dict[int, float]:
    """CPU seconds so far of this process and everything it started, Ray's servers included."""
    me, found = psutil.Process(), {}
    for process in [me, *me.children(recursive=True)]:
        try:
            found[process.pid] = sum(process.cpu_times()[:2])
        except psutil.NoSuchProcess:
            continue
    return found


def measure(iters: int, phases: dict[str, Callable], check: Callable, cleanup: Callable) -> dict[str, object]:
    """Time the phases one after another; each gets what the last returned. Off the clock: `check` once, `cleanup`."""
    rows = []
    for i in range(WARM_UP + iters):
        cpu, row, passed, begin = cpu_seconds(), {}, None, time.perf_counter()
        for name, phase in phases.items():
            start = time.perf_counter()
            passed = phase(passed)
            row[name] = time.perf_counter() - start
        row["s"] = time.perf_counter() - begin
        row["cpu_s"] = sum(s - cpu.get(pid, 0.0) for pid, s in cpu_seconds().items())
        rows.append(row)
        if i == 0:
            check()
        cleanup()
    median = {name: round(statistics.median(r[name] for r in rows[WARM_UP:]), 4) for name in rows[0]}
    return {
        "s": median.pop("s"),
        "min_s": round(min(r["s"] for r in rows[WARM_UP:]), 4),
        "cpu_s": median.pop("cpu_s"),
        "phases_s": median,
        "driver_peak_rss_mib": int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) // 1024,
    }


def report(measured: dict[str, object], *packages: str) -> None:
    """The last line of standard output, as bench/exchange.py reads it."""
    print(json.dumps(measured | {"version": ", ".join(f"{p} {version(p)}" for p in packages)}), flush=True)
