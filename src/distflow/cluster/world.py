"""All workers of a run, as one of them sees them: identities, transports, process groups, device meshes."""

import logging
import os
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from distflow.cluster.identity import Identity, check_identities, describe_hosts, tensor_parallel_hint
from distflow.cluster.rendezvous import Rendezvous
from distflow.comm.collectives import all_gather, all_reduce, barrier
from distflow.comm.shared_memory import host_id
from distflow.comm.transport import Transport
from distflow.config import Config
from distflow.device.process import start_limit_s
from distflow.errors import DistflowError
from distflow.liveness.collectives import record_collectives
from distflow.liveness.heartbeat import Heartbeat
from distflow.plan import Layout, Plan
from distflow.plan.communicators import (
    WEIGHT_SYNC,
    Communicator,
    MeshShape,
    communicators,
    sequence_groups,
    sequence_layouts,
)
from distflow.plan.topology import Topology

logger = logging.getLogger(__name__)


class World:
    """Connects this worker to the others. All workers create it at the same point, and so what it creates."""

    def __init__(
        self,
        config: Config,
        plans: list[Plan],
        shapes: Sequence[MeshShape],
        heartbeat: Heartbeat,
        rendezvous: Rendezvous,
    ) -> None:
        self.heartbeat, self.all_ranks, self.rendezvous = heartbeat, tuple(range(plans[0].workers)), rendezvous
        self.device = own_device()
        # The watchdog has to report a stuck run first: a collective gives up by itself only much later.
        self.timeout = timedelta(seconds=2 * config.wait_limit_s + 60)
        self._groups: list[dist.ProcessGroup] = []
        self._start_timeout = max(self.timeout, timedelta(seconds=2 * start_limit_s(self.device.type) + 60))
        heartbeat.start_task(-1, "connect")
        self.transport = self._transport("main")
        self.background = self._transport("background")  # for one thread besides the worker's own
        # For the communication of steps, if that has a thread of its own.
        self.overlap = self._transport("overlap") if any(p.overlaps for p in plans) else None
        heartbeat.data_age_s = self._data_age_s
        self.identities = self._exchange_identities(config, plans[0], {shape.layout for shape in shapes})
        self.topology = Topology.of([i.host_id for i in self.identities])
        for transport in self._transports():
            transport.use(self.topology, [i.host for i in self.identities])
        self.meshes: dict[MeshShape, DeviceMesh] = {}
        self.sequence_groups: dict[Layout, dist.ProcessGroup] = {}  # of the layouts that divide sequences
        if shapes:  # models talk by torch.distributed
            with heartbeat.waiting(self.all_ranks):
                self._init_process_group()
                self._join(shapes, plans)

    def _transport(self, name: str) -> Transport:
        at = self.rendezvous
        # The heartbeat says what the worker's own thread waits for, and only that.
        waiting = self.heartbeat.waiting if name == "main" else lambda ranks: nullcontext()
        return Transport(at.rank, at.workers, at.store, at.address, self.device, waiting, name)

    def _transports(self) -> list[Transport]:
        return [t for t in (self.transport, self.background, self.overlap) if t]

    def _data_age_s(self, rank: int) -> float | None:
        ages = [age for t in self._transports() if (age := t.data_age_s(rank)) is not None]
        return min(ages, default=None)

    def _init_process_group(self) -> None:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")  # connects two ranks when they first talk to each other
        backend = "gloo"
        if self.device.type != "cpu":
            # Without `device_id`: with it, all ranks would have to take part in the creation of every process group.
            # Nothing uses the device's backend of this group, which not all ranks would join.
            backend = f"cpu:gloo,{self.device.type}:{dist.get_default_backend_for_device(self.device)}"
        store, rank, workers = self.rendezvous.store, self.rendezvous.rank, self.rendezvous.workers
        record_collectives()
        dist.init_process_group(backend, store=store, rank=rank, world_size=workers, timeout=self._start_timeout)

    def _join(self, shapes: Sequence[MeshShape], plans: Sequence[Plan]) -> None:
        """Joins all communicators of this rank, in the order of all ranks; makes meshes of them."""
        rank, on_device = self.rendezvous.rank, self.device.type != "cpu"
        groups: dict[Communicator, dist.ProcessGroup] = {}
        for communicator in communicators(shapes, plans):
            if rank in communicator.ranks:
                groups[communicator] = group = dist.new_group(
                    list(communicator.ranks),
                    timeout=self._start_timeout,
                    group_desc=communicator.name,
                    use_local_synchronization=True,
                    device_id=self.device if on_device else None,
                )
                self._groups.append(group)
                if on_device:  # the first thing that a backend does has to be something that all members do
                    dist.all_reduce(torch.zeros(1, device=self.device), group=group)
                if communicator.name == WEIGHT_SYNC:
                    for transport in self._transports():
                        transport.device_group = group
        for shape in (s for s in shapes if s.layout.replica_of(rank) is not None):
            own = [groups[c] for c in shape.communicators() if rank in c.ranks]
            ranks = torch.tensor(shape.layout.ranks).view(*shape.dims.values())
            self.meshes[shape] = DeviceMesh.from_group(own, self.device.type, ranks, mesh_dim_names=tuple(shape.dims))
        for layout in sequence_layouts(plans):
            self.sequence_groups.update((layout, groups[c]) for c in sequence_groups(layout) if rank in c.ranks)

    def end_start(self) -> None:
        """Shortens the time-outs of collectives: from now on no rank loads or compiles while others wait."""
        for group in self._groups:
            dist.distributed_c10d._set_pg_timeout(self.timeout, group)

    def _exchange_identities(self, config: Config, plan: Plan, layouts: Collection[Layout]) -> list[Identity]:
        """Exchanges identities. Raises on all workers unless all run the same thing."""
        try:
            host = host_id()
        except OSError:  # forbidden by a sandbox
            host = f"alone-{self.rendezvous.rank}"
        own = Identity.own(self.rendezvous.address, host, config, plan, self.device)
        data = torch.frombuffer(bytearray(own.pack()), dtype=torch.uint8)
        gathered = self.transport.run(all_gather(self.rendezvous.rank, self.all_ranks, data))
        identities = [Identity.unpack(bytes(row)) for row in gathered.numpy()]
        check_identities(identities)
        self.heartbeat.peers = [i.peer(own) for i in identities]
        if self.rendezvous.rank == 0:
            if self.rendezvous.env.launcher != "distflow":  # which starts all of them on this host
                logger.info("%s", describe_hosts(identities))
            if hint := tensor_parallel_hint(layouts, identities):
                logger.warning("%s", hint)
        return identities

    def any_rank(self, value: bool) -> bool:
        """Returns whether `value` is true on any rank. All ranks call it at the same point."""
        return bool(self.all_reduce(torch.tensor([value]), torch.logical_or))

    def all_reduce(self, data: Tensor, op: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Returns the reduction of all ranks' data, in host memory. All ranks call it at the same point."""
        return self.transport.run(all_reduce(self.rendezvous.rank, self.all_ranks, data, op))

    def leave_together(self) -> None:
        """Returns once no worker needs the store any more, which may be gone with the first one that leaves.

        In the first barrier workers may have to look up where others listen. At the second they have, and none
        leaves it before all are there.
        """
        for _ in range(2):
            self.transport.run(barrier(self.rendezvous.rank, self.all_ranks))

    def close(self) -> None:
        for transport in self._transports():
            transport.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def own_device() -> torch.device:
    """Returns the accelerator with this worker's local rank, or the CPU where there is none; makes it the default."""
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if kind is None or kind.type == "mps":  # which has no float64
        return torch.device("cpu")
    count, local_rank = torch.accelerator.device_count(), int(os.environ.get("LOCAL_RANK", "0"))
    if count == 1 and "LOCAL_WORLD_SIZE" not in os.environ:  # the scheduler shows each worker a device of its own
        local_rank = 0
    if local_rank >= count:
        raise DistflowError(
            f"local rank {local_rank} has no {kind.type} device of its own: this host shows {count}; start at most"
            " that many workers on it, or hide the devices to train on the CPU"
        )
    device = torch.device(kind.type, local_rank)
    torch.accelerator.set_device_index(device)
    return device
