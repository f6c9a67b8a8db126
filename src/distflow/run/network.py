"""This worker's ways to the others."""

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

# Set by `distflow run` to where workers meet. It also tells the cause of a failure, once, so that workers need not.
LAUNCHED = "DISTFLOW_LAUNCHED"


class Network:
    """Process groups, meshes for the layouts of models, and `comm` for the data plane. Made by all at once."""

    def __init__(self, config: Config, plans: list[Plan], layouts: Collection[Layout], heartbeat: Heartbeat) -> None:
        self.heartbeat, self.everybody = heartbeat, tuple(range(plans[0].workers))
        cuda = torch.cuda.is_available()
        self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(self.device)
        # The watchdog is to speak first: a collective gives up by itself only much later.
        self.timeout = timedelta(seconds=2 * config.wait_limit_s + 60)
        heartbeat.doing(-1, "meet")
        with heartbeat.waiting(self.everybody):
            backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
            if LAUNCHED in os.environ:
                host, _, port = os.environ[LAUNCHED].rpartition(":")
                common = dist.TCPStore(host, int(port), timeout=self.timeout)
                store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), common)
                rank, workers = int(os.environ["RANK"]), len(self.everybody)
                dist.init_process_group(backend, store=store, rank=rank, world_size=workers, timeout=self.timeout)
            else:
                dist.init_process_group(backend, timeout=self.timeout)
            sets = [t.ranks for p in plans for t in p.tasks if isinstance(t, Weights)]
            moves = [m.ranks for p in plans for m in p.moves]
            self.comm = Transport([self.everybody, *moves, *sets], self.device, heartbeat.waiting)
            self.meshes = {layout: self._mesh(layout) for layout in layouts}
            self.process_groups = {layout: self.group(layout.ranks) for layout in layouts}
            self._all = self.group(self.everybody)

    def _mesh(self, layout: Layout) -> DeviceMesh:
        ranks = torch.tensor(layout.ranks).view(layout.dp, layout.tp)
        return DeviceMesh(self.device.type, ranks, mesh_dim_names=("dp", "tp"))

    def group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        made: dist.ProcessGroup = dist.new_group(list(ranks), backend="gloo", timeout=self.timeout)
        return made

    def agree(self, config: Config, plan: Plan) -> None:
        """All workers have derived the same plan from the same config, or none of them starts."""
        told = config.model_dump_json(exclude={"run_dir"})
        mine = hashlib.sha256(plan.hash.encode() + told.encode()).digest()
        gathered = self.comm.perform(AllGather(self.everybody, torch.frombuffer(bytearray(mine), dtype=torch.uint8)))
        hashes = [bytes(h).hex()[:12] for h in gathered.cpu().tolist()]
        if len(set(hashes)) > 1:
            camps = {h: format_ranks(tuple(r for r in self.everybody if hashes[r] == h)) for h in hashes}
            raise DistflowError(
                f"the workers derived different plans: {', '.join(f'ranks {r} have {h}' for h, r in camps.items())};"
                " their config, code or data files differ: compare `distflow plan CONFIG --json` on those hosts"
            )

    def any_of_us(self, yes: bool) -> bool:
        """Whether somebody says yes; asked of all at the same point."""
        if len(self.everybody) == 1:
            return yes
        flag = torch.tensor([int(yes)])
        with self.heartbeat.waiting(self.everybody):
            dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._all)
        return bool(flag)

    def wait_for_all(self) -> None:
        with self.heartbeat.waiting(self.everybody):
            dist.barrier()
