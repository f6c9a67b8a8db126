"""How a worker communicates with the others: process groups, device meshes, the transport of the data plane."""

import logging
import os
from collections.abc import Collection
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from distflow.config import Config
from distflow.data.exchange import AllGather
from distflow.data.shared_memory import host_id
from distflow.data.transport import Transport
from distflow.errors import DistflowError
from distflow.observe.heartbeat import Heartbeat
from distflow.plan import Layout, Plan, Weights
from distflow.run.identity import Identity, check_identities, describe_hosts, tensor_parallel_hint
from distflow.run.rendezvous import Rendezvous

logger = logging.getLogger(__name__)


class Network:
    """Process groups, meshes for the layouts of models, and the transport. Created by all workers at once."""

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
        with heartbeat.waiting(self.all_ranks):
            self._init_process_group()
            weights = [t.ranks for p in plans for t in p.tasks if isinstance(t, Weights)]
            moves = [m.ranks for p in plans for m in p.moves]
            self.transport = Transport([self.all_ranks, *moves, *weights], self.device, heartbeat.waiting)
            self.identities = self._exchange_identities(config, plans[0], layouts)
            self.meshes = {layout: self._mesh(layout) for layout in layouts}
            self.process_groups = {layout: self.new_process_group(layout.ranks) for layout in layouts}
            self._all = self.new_process_group(self.all_ranks)

    def _init_process_group(self) -> None:
        backend = "gloo"
        if self.device.type != "cpu":
            # Without `device_id`: process groups for the CPU only, as those below, could then not be created.
            backend = f"cpu:gloo,{self.device.type}:{dist.get_default_backend_for_device(self.device)}"
        store, rank, workers = self.rendezvous.store, self.rendezvous.rank, self.rendezvous.workers
        dist.init_process_group(backend, store=store, rank=rank, world_size=workers, timeout=self.timeout)

    def _mesh(self, layout: Layout) -> DeviceMesh:
        ranks = torch.tensor(layout.ranks).view(layout.dp, layout.tp)
        return DeviceMesh(self.device.type, ranks, mesh_dim_names=("dp", "tp"))

    def new_process_group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        process_group: dist.ProcessGroup = dist.new_group(list(ranks), backend="gloo", timeout=self.timeout)
        return process_group

    def _exchange_identities(self, config: Config, plan: Plan, layouts: Collection[Layout]) -> list[Identity]:
        """Returns who and where all workers are. Raises on all of them unless all run the same thing."""
        try:
            host = host_id()
        except OSError:  # forbidden by a sandbox
            host = f"alone-{self.rendezvous.rank}"
        own = Identity.own(self.rendezvous.address, host, config, plan, self.device)
        data = torch.frombuffer(bytearray(own.pack()), dtype=torch.uint8)
        gathered = self.transport.execute(AllGather(self.all_ranks, data))
        identities = [Identity.unpack(bytes(row.tolist())) for row in gathered]
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
        if len(self.all_ranks) == 1:
            return value
        flag = torch.tensor([int(value)])
        with self.heartbeat.waiting(self.all_ranks):
            dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._all)
        return bool(flag)

    def barrier(self) -> None:
        with self.heartbeat.waiting(self.all_ranks):
            dist.barrier(group=self._all)


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
