"""All workers of a run, as one of them sees them: identities, transports, process groups, device meshes."""

import logging
import os
from collections.abc import Callable, Collection
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
from distflow.errors import DistflowError
from distflow.liveness.heartbeat import Heartbeat
from distflow.plan import Layout, Plan
from distflow.plan.topology import Topology

logger = logging.getLogger(__name__)


class World:
    """Connects this worker to the others. All workers create it at the same point, and so what it creates."""

    def __init__(
        self,
        config: Config,
        plans: list[Plan],
        layouts: Collection[Layout],
        heartbeat: Heartbeat,
        rendezvous: Rendezvous,
    ) -> None:
        self.heartbeat, self.all_ranks, self.rendezvous = heartbeat, tuple(range(plans[0].workers)), rendezvous
        self.device = own_device()
        # The watchdog has to report a stuck run first: a collective gives up by itself only much later.
        self.timeout = timedelta(seconds=2 * config.wait_limit_s + 60)
        heartbeat.start_task(-1, "connect")
        self.transport = self._transport("main")
        self.background = self._transport("background")  # for one thread besides the worker's own
        # For the communication of steps, if that has a thread of its own.
        self.overlap = self._transport("overlap") if any(p.overlaps for p in plans) else None
        heartbeat.data_age_s = self._data_age_s
        self.identities = self._exchange_identities(config, plans[0], layouts)
        self.topology = Topology.of([i.host_id for i in self.identities])
        for transport in self._transports():
            transport.use(self.topology, [i.host for i in self.identities])
        self.meshes: dict[Layout, DeviceMesh] = {}
        if layouts:  # models talk by torch.distributed
            with heartbeat.waiting(self.all_ranks):
                self._init_process_group()
                self.meshes = {layout: self.mesh(layout) for layout in layouts if self._within(layout)}

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
            backend = f"cpu:gloo,{self.device.type}:{dist.get_default_backend_for_device(self.device)}"
        store, rank, workers = self.rendezvous.store, self.rendezvous.rank, self.rendezvous.workers
        dist.init_process_group(backend, store=store, rank=rank, world_size=workers, timeout=self.timeout)

    def _within(self, layout: Layout) -> bool:
        return layout.replica_of(self.rendezvous.rank) is not None

    def mesh(self, layout: Layout, shard: int | None = None) -> DeviceMesh:
        """Returns the mesh `dp` × `tp` of a layout that this rank is in; with `shard`, `replicate` × `shard` × `tp`.

        Only the ranks of the layout call it, all of them at the same point; each creates its own process groups.
        """
        if shard is None:
            return self._mesh(torch.tensor(layout.ranks).view(layout.dp, layout.tp), ("dp", "tp"))
        ranks = torch.tensor(layout.ranks).view(layout.dp // shard, shard, layout.tp)
        return self._mesh(ranks, ("replicate", "shard", "tp"))

    def _mesh(self, ranks: Tensor, names: tuple[str, ...]) -> DeviceMesh:
        place = (ranks == self.rendezvous.rank).nonzero()[0].tolist()
        device = self.device if self.device.type != "cpu" else None
        groups = []
        for dim in range(ranks.ndim):
            index = tuple(slice(None) if d == dim else at for d, at in enumerate(place))
            groups.append(
                dist.new_group(
                    ranks[tuple(index)].tolist(), timeout=self.timeout, use_local_synchronization=True, device_id=device
                )
            )
        return DeviceMesh.from_group(groups, self.device.type, ranks, mesh_dim_names=names)

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

        In the first barrier workers may have to look up where others listen. Who comes to the second has done so, and
        all come to it before one leaves.
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
