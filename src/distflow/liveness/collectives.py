"""Collectives of models that have begun and not ended, as torch's flight recorder knows them.

A worker does not know that it waits inside of one: on a device it goes on, and waits for a number much later.
"""

import json
import os
import time
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

_BUFFER = "TORCH_FR_BUFFER_SIZE"
_ENTRIES = 2000  # of the recorder: more than are begun and not ended at a time
_DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")  # of a device's backend, and of gloo


@dataclass(frozen=True)
class Collective:
    """An operation that others have not joined, or not ended."""

    operation: str  # such as nccl:all_reduce
    group: str  # what its process group is for
    ranks: tuple[int, ...]
    age_s: float

    def __str__(self) -> str:
        return f"{self.operation} ({self.group})" if self.group else self.operation


def record_collectives() -> None:
    """Lets torch record collectives; call it before there is a process group."""
    os.environ.setdefault(_BUFFER, str(_ENTRIES))


def oldest_unfinished() -> Collective | None:
    """Returns the oldest collective that this worker has begun and that has not ended."""
    entries = [e for name in _DUMPS for e in _recorded(name)]
    # A group's operations end in turn: one before another that has ended was not followed to its end.
    ended: dict[tuple[str, ...], int] = {}
    for e in entries:
        if e["retired"]:
            key = tuple(e["process_group"])
            ended[key] = max(e["op_id"], ended.get(key, -1))
    open_ones = [
        e
        for e in entries
        if not e["retired"] and not e["is_p2p"] and e["op_id"] > ended.get(tuple(e["process_group"]), -1)
    ]
    if not open_ones:
        return None
    oldest = min(open_ones, key=lambda e: int(e["time_created_ns"]))
    name, purpose = oldest["process_group"]
    age_s = (time.time_ns() - oldest["time_created_ns"]) / 1e9
    return Collective(oldest["profiling_name"], "" if purpose == "undefined" else purpose, _ranks_of(name), age_s)


def _recorded(dump: str) -> list[dict[str, Any]]:
    function = getattr(c10d, dump, None)
    if function is None or not dist.is_initialized():
        return []
    entries: list[dict[str, Any]] = json.loads(function()).get("entries", [])
    return entries


def _ranks_of(name: str) -> tuple[int, ...]:
    """Returns the ranks of a process group, none if it is gone."""
    groups: Any = dist.distributed_c10d._world.pg_names
    return next((tuple(dist.get_process_group_ranks(group)) for group, n in groups.items() if n == name), ())
