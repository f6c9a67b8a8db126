"""The steps of bench/steps.py by a single controller: a driver on the first host gets every output and deals it out.

Its wire format, sockets and shared memory are ours. As in frameworks of that kind, a stage is a call: the driver sends
it all that it reads and receives all that it writes. Sizes are known beforehand, so there is no negotiation, and the
weight sync, which such frameworks do between workers, is left out. Used by bench/scaling.py; not run by itself.
"""

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from distflow.batch.batch import Column, Ragged
from distflow.comm.collectives import SendReceive
from distflow.comm.routes import assign_replicas, contiguous_replicas
from distflow.comm.transport import Transport
from distflow.comm.wire import Segments, flatten, pack, segment_size, unpack
from distflow.plan import Layout
from steps import COMPUTE, CRITIC, INTS, TOKEN_BYTES, Work, join, lengths

MEMORY = Path("/sys/fs/cgroup/memory")  # of cgroups version 1


class Stages:
    """What driver and workers agree on: who has which samples of a step, before and after they are balanced."""

    def __init__(self, step: int, workers: Sequence[int], work: Work) -> None:
        samples = work.rows * len(workers)
        self.work, self.lengths = work, lengths(range(step * samples, (step + 1) * samples), work.tokens)
        replicas = len(workers) // 2
        generate, train = Layout(tuple(workers), replicas, 2), Layout(tuple(workers), len(workers))
        old = contiguous_replicas(samples, replicas)
        new = assign_replicas(old, generate, train, self.lengths, 1, balance=True)
        self.generated = {generate.replicas[d][0]: np.flatnonzero(old == d) for d in range(replicas)}
        self.dealt = {r: np.flatnonzero(new == d) for d, r in enumerate(workers)}

    @property
    def forward(self) -> list[tuple[str, str]]:
        """The nodes that read the samples as they were generated, and the field that each writes."""
        return [("old", "old_logprobs"), ("ref", "ref_logprobs"), *[("values", "values")] * self.work.ppo]

    @property
    def updates(self) -> list[tuple[str, tuple[str, ...]]]:
        """The nodes that train, and what they read."""
        return [("update", tuple(TOKEN_BYTES)), *[("update_critic", (*INTS, *CRITIC))] * self.work.ppo]

    def ranges(self, fields: Sequence[str], slots: Mapping[int, np.ndarray]) -> dict[int, tuple[int, int]]:
        """Returns the bytes of each rank's segment, one after the other."""
        width = sum(self.work.token_bytes[f] for f in fields)
        sizes = [segment_size(len(fields), len(s), width * int(self.lengths[s].sum())) for s in slots.values()]
        ends = np.cumsum(sizes).tolist()
        return {r: (end - size, end) for r, size, end in zip(slots, sizes, ends, strict=True)}


class Driver:
    """Holds the whole batch of a step."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.batch: dict[str, Column] = {}

    def gather(self, stages: Stages, fields: Sequence[str], slots: Mapping[int, np.ndarray]) -> None:
        ranges = stages.ranges(fields, slots)
        out = torch.empty(max(end for _, end in ranges.values()), dtype=torch.uint8)
        self.transport.execute(SendReceive(0, lambda _: None, {}, out, ranges))
        segments = _segments(slots, ranges)
        self.batch |= unpack(out, segments, fields, np.argsort(np.concatenate(list(slots.values()))), "driver")

    def deal(self, stages: Stages, fields: Sequence[str]) -> None:
        ranges = stages.ranges(fields, stages.dealt)
        columns = [flatten(self.batch[f], "driver") for f in fields]
        index, segments = np.concatenate(list(stages.dealt.values())), _segments(stages.dealt, ranges)
        size = max(end for _, end in ranges.values())
        none = torch.empty(0, dtype=torch.uint8)
        self.transport.execute(SendReceive(size, lambda out: pack(columns, index, segments, out), ranges, none, {}))

    def step(self, stages: Stages) -> None:
        self.gather(stages, INTS, stages.generated)
        for _, field in stages.forward:
            self.deal(stages, INTS)
            self.gather(stages, (field,), stages.dealt)
        n = stages.lengths
        for field in ("advantage", "returns")[: 1 + stages.work.ppo]:
            self.batch[field] = Ragged.packed(torch.zeros(int(n.sum())), n)
        for _, fields in stages.updates:
            self.deal(stages, fields)
        self.batch.clear()


class Stage:
    """A worker: sends what it has generated or computed, receives what it needs for that."""

    def __init__(self, rank: int, driver: int, transport: Transport) -> None:
        self.rank, self.driver, self.transport = rank, driver, transport

    def send(self, stages: Stages, fields: Sequence[str], slots: Mapping[int, np.ndarray]) -> None:
        if self.rank not in slots:
            return
        n = stages.lengths[slots[self.rank]]
        floats = fields[0] not in INTS
        values = torch.zeros(int(n.sum()), dtype=torch.float32 if floats else torch.int64)
        columns = [flatten(Ragged.packed(values, n), "worker") for _ in fields]
        own = stages.ranges(fields, {self.rank: slots[self.rank]})[self.rank]
        segments = _segments({self.rank: slots[self.rank]}, {self.rank: own})
        none = torch.empty(0, dtype=torch.uint8)
        request = SendReceive(
            own[1], lambda out: pack(columns, np.arange(len(n)), segments, out), {self.driver: own}, none, {}
        )
        self.transport.execute(request)

    def receive(self, stages: Stages, fields: Sequence[str]) -> None:
        mine = {self.rank: stages.dealt[self.rank]}
        ranges = stages.ranges(fields, mine)
        out = torch.empty(ranges[self.rank][1], dtype=torch.uint8)
        self.transport.execute(SendReceive(0, lambda _: None, {}, out, {self.driver: ranges[self.rank]}))
        unpack(out, _segments(mine, ranges), fields, np.arange(len(mine[self.rank])), "worker")

    def step(self, stages: Stages, compute_s: float) -> None:
        time.sleep(compute_s * COMPUTE["generate"])
        self.send(stages, INTS, stages.generated)
        for node, field in stages.forward:
            self.receive(stages, INTS)
            time.sleep(compute_s * COMPUTE[node])
            self.send(stages, (field,), stages.dealt)
        for node, fields in stages.updates:
            self.receive(stages, fields)
            time.sleep(compute_s * COMPUTE[node])


def _segments(slots: Mapping[int, np.ndarray], ranges: Mapping[int, tuple[int, int]]) -> Segments:
    return Segments(np.array([len(s) for s in slots.values()]), np.array([ranges[r][0] for r in slots]))


def run_controller(rank: int, per_host: int, work: Work, steps: int, cgroup: int | None) -> list[float] | None:
    """One process: the first `per_host` of each host are workers, the next one of the first host is the driver.

    Returns when each step ended; one with few tokens comes first and is the start. `cgroup`: an open file that puts the
    driver under a limit of memory.
    """
    driver, local = per_host, rank % (per_host + 1)
    if cgroup is not None and rank == driver:
        os.write(cgroup, b"0")
    me = join()
    ends = []
    workers = [r for r in range(me.workers) if r % (per_host + 1) < per_host]
    if rank != driver and local == per_host:
        return None
    process = Driver(me.transport) if rank == driver else Stage(rank, driver, me.transport)
    for step in range(steps + 1):
        now = work if step else replace(work, tokens=16, compute_s=0.0)
        stages = Stages(step, workers, now)
        process.step(stages) if isinstance(process, Driver) else process.step(stages, now.compute_s)
        ends.append(time.monotonic())
    return ends


@contextmanager
def memory_limit(size: int) -> Any:
    """Yields an open file: whoever writes 0 to it may use `size` bytes, and is killed beyond; then, how many were."""
    group = MEMORY / f"bench-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(size))
        with open(group / "cgroup.procs", "wb", buffering=0) as file:
            yield file.fileno(), lambda: _killed(group)
    finally:
        group.rmdir()


def _killed(group: Path) -> int:
    control = dict(line.split() for line in (group / "memory.oom_control").read_text().splitlines())
    return int(control["oom_kill"])


def can_limit_memory() -> bool:
    return (MEMORY / "memory.limit_in_bytes").exists() and os.access(MEMORY, os.W_OK)
