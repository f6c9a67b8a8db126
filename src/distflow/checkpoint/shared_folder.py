"""Checks that the workers of all hosts see one folder, without which no checkpoint could be read."""

import secrets
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from distflow.comm.collectives import Communication, all_gather_bytes, all_reduce, broadcast_bytes
from distflow.errors import ConfigError, cut
from distflow.plan.layout import format_ranks

_LAG_S = 5.0  # a network file system may show a new file late
Run = Callable[[Communication[Any]], Any]


def check_shared(folder: Path, rank: int, ranks: Sequence[int], run: Run) -> None:
    """Raises on all workers if one of them does not see what the first one writes to `folder`."""
    if len(ranks) == 1:
        return
    probe, problem = b"", ""
    if rank == ranks[0]:
        probe = f".shared-{secrets.token_hex(8)}".encode()
        try:
            (folder / probe.decode()).touch()
        except OSError as e:
            problem = f"cannot write to it ({e.strerror})"
    file = folder / run(broadcast_bytes(rank, ranks, probe)).decode()
    if rank != ranks[0] and not _appears(file):
        problem = f"does not see what rank {ranks[0]} writes there"
    failed = run(all_reduce(rank, ranks, torch.tensor([problem != ""]), torch.logical_or))
    if rank == ranks[0]:
        file.unlink(missing_ok=True)
    if not failed:
        return
    own = f"on host {socket.gethostname()} {problem}" if problem else ""
    reports = run(all_gather_bytes(rank, ranks, own.encode()))
    first = min(filter(None, reports))
    which = format_ranks(tuple(r for r, report in zip(ranks, reports, strict=True) if report == first))
    raise ConfigError(
        f"run_dir: {folder}: rank {which} {cut(first.decode())}; checkpoints need a folder that all hosts share: set"
        " run_dir to one"
    )


def _appears(file: Path) -> bool:
    end = time.monotonic() + _LAG_S
    while not file.exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True
