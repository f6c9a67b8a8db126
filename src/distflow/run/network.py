"""How a worker communicates with the others: process groups, device meshes, the transport of the data plane."""

import hashlib
import os
from collections.abc import Collection
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from distflow.config import Config
from distflow.data.exchange import AllGather
from distflow.data.transport import Transport
from distflow.errors import DistflowError
from distflow.observe.heartbeat import Heartbeat
from distflow.plan import Layout, Plan, Weights, format_ranks

# Set by `distflow run` for its workers: host:port of the store where they meet. That launcher also reports why the run
# failed, so its workers need not.
LAUNCHER_STORE = "DISTFLOW_LAUNCHER_STORE"


class Network:
    """Process groups, meshes for the layouts of models, and the transport. Created by all workers at once."""

    def __init__(self, config: Config, plans: list[Plan], layouts: Collection[Layout], heartbeat: Heartbeat) -> None:
        self.heartbeat, self.all_ranks = heartbeat, tuple(range(plans[0].workers))
        self.device = own_device()
        # The watchdog has to report a stuck run first: a collective gives up by itself only much later.
        self.timeout = timedelta(seconds=2 * config.wait_limit_s + 60)
        heartbeat.start_task(-1, "connect")
        with heartbeat.waiting(self.all_ranks):
            self._init_process_group()
            weights = [t.ranks for p in plans for t in p.tasks if isinstance(t, Weights)]
            moves = [m.ranks for p in plans for m in p.moves]
            self.transport = Transport([self.all_ranks, *moves, *weights], self.device, heartbeat.waiting)
            self.meshes = {layout: self._mesh(layout) for layout in layouts}
            self.process_groups = {layout: self.new_process_group(layout.ranks) for layout in layouts}
            self._all = self.new_process_group(self.all_ranks)

    def _init_process_group(self) -> None:
        backend = "gloo"
        if self.device.type != "cpu":
            # Without `device_id`: process groups for the CPU only, as those below, could then not be created.
            backend = f"cpu:gloo,{self.device.type}:{dist.get_default_backend_for_device(self.device)}"
        if LAUNCHER_STORE not in os.environ:
            dist.init_process_group(backend, timeout=self.timeout)
            return
        host, _, port = os.environ[LAUNCHER_STORE].rpartition(":")
        shared = dist.TCPStore(host, int(port), timeout=self.timeout)
        store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), shared)
        rank, workers = int(os.environ["RANK"]), len(self.all_ranks)
        dist.init_process_group(backend, store=store, rank=rank, world_size=workers, timeout=self.timeout)

    def _mesh(self, layout: Layout) -> DeviceMesh:
        ranks = torch.tensor(layout.ranks).view(layout.dp, layout.tp)
        return DeviceMesh(self.device.type, ranks, mesh_dim_names=("dp", "tp"))

    def new_process_group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        process_group: dist.ProcessGroup = dist.new_group(list(ranks), backend="gloo", timeout=self.timeout)
        return process_group

    def check_same_plan(self, config: Config, plan: Plan) -> None:
        """Raises on all workers unless all have derived the same plan from the same config."""
        text = config.model_dump_json(exclude={"run_dir"})
        own = hashlib.sha256(plan.hash.encode() + text.encode()).digest()
        gathered = self.transport.execute(
            AllGather(self.all_ranks, torch.frombuffer(bytearray(own), dtype=torch.uint8))
        )
        hashes = [bytes(h).hex()[:12] for h in gathered.tolist()]
        if len(set(hashes)) > 1:
            ranks = {h: format_ranks(tuple(r for r in self.all_ranks if hashes[r] == h)) for h in hashes}
            raise DistflowError(
                f"the workers derived different plans: {', '.join(f'ranks {r} have {h}' for h, r in ranks.items())};"
                " their config, code or data files differ: compare `distflow plan CONFIG --json` on those hosts"
            )

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
