"""Run a function in N real processes that form a gloo process group."""

import tempfile
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from itertools import count
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from forks import Queue, fork
from limits import TimeLimit


def spawn(n: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 120) -> list[Any]:
    """fn(rank, *args) on each rank; what they return, by rank. An exception fails the test with its traceback.

    `timeout_s`, of an idle machine, is for the next of them to answer.
    """
    answers: Any = Queue()
    with tempfile.TemporaryDirectory() as folder:
        meeting = (Path(folder) / "store").as_uri()
        workers = [fork(_worker, r, n, meeting, answers, fn, args, daemon=True) for r in range(n)]
        results: dict[int, Any] = {}
        limit = TimeLimit(timeout_s)
        try:
            while len(results) < n:
                left = {w.sentinel: r for r, w in enumerate(workers) if r not in results}
                ready = wait([answers._reader, *left], max(0.0, limit.left()))
                if not ready and limit.left() > 0:
                    continue
                if answers._reader not in ready:  # a worker answers before it ends
                    ended = [r for sentinel, r in left.items() if sentinel in ready]
                    state = f"ended, exit code {workers[ended[0]].exitcode}" if ended else f"took over {limit}"
                    raise AssertionError(f"ranks {ended or sorted(left.values())} of {n} gave no answer: {state}")
                rank, ok, value = answers.get()
                assert ok, f"rank {rank} of {n}:\n{value}"
                results[rank], limit = value, TimeLimit(timeout_s)
        finally:
            for w in workers:
                w.kill() if len(results) < n else w.join()
    return [results[r] for r in range(n)]


def _worker(rank: int, n: int, meeting: str, answers: Any, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=n)
        result = fn(rank, *args)
        dist.barrier()
        answers.put((rank, True, result))
    except BaseException:
        answers.put((rank, False, traceback.format_exc()))


_names = count()


def make_transport(rank: int, workers: int, device: str = "cpu", topology: Any = None) -> Any:
    """Returns a transport between the ranks of `spawn`, which make it at the same time; all are on one host."""
    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _get_default_store

    from distflow.comm.transport import Transport
    from distflow.plan.topology import Topology

    store, name = _get_default_store(), f"test{next(_names)}"
    made = Transport(rank, workers, store, "127.0.0.1", torch.device(device), lambda _: nullcontext(), name)
    made.use(topology or Topology.single(workers))
    if device != "cpu":
        made.device_group = dist.new_group(list(range(workers)))
        dist.all_reduce(torch.zeros(1, device=device), group=made.device_group)
    return made
