# mypy: ignore-errors
"""What every peer is measured on, and how: the traffic of bench/exchange.py, a private Ray, and the clock.

Not run by itself; see verl_dataproto.py and transferqueue.py.
"""

import argparse
import ctypes
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version

import psutil
import torch

SAMPLES, TOKENS, WARM_UP = 1024, 4096, 2
FIELDS = {
    "input_ids": torch.int64,
    "attention_mask": torch.int64,
    "position_ids": torch.int64,
    "old_log_probs": torch.float32,
    "ref_log_probs": torch.float32,
    "advantages": torch.float32,
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


# Without these Ray nices its workers, which costs them the processor whenever somebody else wants it, and starts spare
# ones during the first iterations. The rest keeps memory that is in use between iterations, which suits every peer.
SETTINGS = {
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_worker_niceness": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_preallocate_plasma_memory": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
    "MALLOC_ARENA_MAX": "1",
    "HF_HUB_OFFLINE": "1",
}
M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8  # of mallopt(3)


@contextmanager
def private_ray(n: int, **more: str) -> Iterator[None]:
    """A Ray of our own with these settings, gone with all its processes and files at the end, whatever happens."""
    import ray

    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    os.environ |= SETTINGS | more
    libc = ctypes.CDLL(None)  # this process has started, so malloc no longer reads its settings from the environment
    for option, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, 2**31 - 1), (M_ARENA_MAX, 1)):
        libc.mallopt(option, value)
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as tmp:
        try:
            ray.init(
                address="local",
                num_cpus=4 * n + 8,  # what actors ask for, not what there is
                num_gpus=0,
                object_store_memory=3 << 30,
                include_dashboard=False,
                log_to_driver=False,
                logging_level="ERROR",
                runtime_env={"env_vars": SETTINGS | more | {"OMP_NUM_THREADS": "1"}},
                _temp_dir=tmp,
            )
            yield
        finally:
            started = psutil.Process().children(recursive=True)
            ray.shutdown()
            for process in psutil.wait_procs(started, timeout=5)[1]:
                process.kill()
            psutil.wait_procs(started, timeout=5)


def cpu_seconds() -> dict[int, float]:
    """CPU seconds so far of this process and everything it started, Ray's servers included."""
    me = psutil.Process()
    found = {}
    for process in [me, *me.children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        found[process.pid] = times.user + times.system
    return found


def measure(
    iters: int, exchange: Callable[[], dict[str, float]], check: Callable[[], None], cleanup: Callable[[], None]
) -> dict[str, object]:
    """Time `exchange`, which returns the seconds of its phases; off the clock, `check` the first and `cleanup` each."""
    seconds, cpu, phases = [], [], []
    for i in range(WARM_UP + iters):
        cpu_before = cpu_seconds()
        start = time.perf_counter()
        phase = exchange()
        seconds.append(time.perf_counter() - start)
        cpu.append(sum(s - cpu_before.get(pid, 0.0) for pid, s in cpu_seconds().items()))
        phases.append(phase)
        if i == 0:
            check()
        cleanup()
    return {
        "s": statistics.median(seconds[WARM_UP:]),
        "min_s": min(seconds[WARM_UP:]),
        "cpu_s": statistics.median(cpu[WARM_UP:]),
        "phases_s": {name: statistics.median(p[name] for p in phases[WARM_UP:]) for name in phases[0]},
    }


def report(workers: int, measured: dict[str, object], packages: list[str], **more: object) -> None:
    """The last line of standard output, as bench/exchange.py reads it."""
    with open("/proc/self/status") as status:
        peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    row = {
        "workers": workers,
        **measured,
        "driver_peak_rss_mib": round(peak / 1024),
        **more,
        "version": ", ".join(f"{p} {version(p)}" for p in packages),
    }
    print(json.dumps(row), flush=True)
