# mypy: ignore-errors
"""The steps of bench/scaling.py, which starts it, by verl's single controller and by TransferQueue over a Ray cluster.

    .peers/verl/bin/python bench/peers/steps_over_ray.py ADDRESS < requests

A request is a line of JSON: {"system": "verl" | "verl, numpy" | "transferqueue", "hosts", "rows", "tokens", "steps"}
with rows per host; the answer is a line with the seconds of each step. With "pixels": {"n", "floats"} each n rows have
a tensor of so many numbers in common, as verl carries `multi_modal_inputs`; rows stay with their host then, so that it
is pickled once. One actor on each host: fewer messages than with several. As verl's trainer does, every stage gets its
inputs from the driver and returns its outputs to it; but only the fields that it reads, and rows are dense, so that
there is no padding.
"""

import json
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
import ray
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from tensordict import TensorDict
from verl import DataProto
from verl.single_controller.base.decorator import (
    Dispatch,
    collect_dp_compute_data_proto,
    dispatch_one_to_all,
    register,
)
from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import serve

INTS, FLOATS = ("tokens", "mask", "position"), ("old_logprobs", "ref_logprobs", "advantage")
PIXELS = "multi_modal_inputs"
PARTITION, METHOD = "step", "VERL_DATAPROTO_SERIALIZATION_METHOD"


def deal(hosts: int, rows: int) -> torch.Tensor:
    """Returns the rows that each host trains on, [hosts, rows], as balance would have it: any."""
    return torch.randperm(hosts * rows, generator=torch.Generator().manual_seed(0)).view(hosts, rows)


@ray.remote(num_cpus=0)
class Peer:
    """All stages of one host; compute takes no time."""

    def prepare(self, rank: int, hosts: int, rows: int, tokens: int, method: str, pixels: dict) -> int:
        """Returns the sum of the tokens that it will generate."""
        os.environ[METHOD] = method
        self.pixels = {}
        if pixels:
            each = [{"pixel_values": torch.rand(pixels["floats"])} for _ in range(rows // pixels["n"])]
            self.pixels = {PIXELS: np.array(each, object).repeat(pixels["n"])}
        self.mine = {f: torch.randint(1 << 16, (rows, tokens)) for f in INTS}
        self.floats = {f: torch.rand(rows, tokens) for f in FLOATS}
        # Nearly all rows change their host, as ours do.
        self.put_keys = [str(i) for i in range(rank * rows, (rank + 1) * rows)]
        self.get_keys = [str(i) for i in deal(hosts, rows)[rank].tolist()]
        return int(self.mine["tokens"].sum())

    @register(dispatch_mode={"dispatch_fn": dispatch_one_to_all, "collect_fn": collect_dp_compute_data_proto})
    def generate(self) -> DataProto:
        return DataProto.from_dict(tensors=self.mine, non_tensors=self.pixels)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def logprobs(self, data: DataProto) -> DataProto:
        return DataProto.from_dict(tensors={data.meta_info["writes"]: self.floats["old_logprobs"]})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def update(self, data: DataProto) -> int:
        return int(data.batch["tokens"].sum())

    def join(self) -> None:
        tq.init()

    def leave(self) -> None:
        """Forgets the queue, which the driver is about to close: with more hosts there will be another."""
        tq.interface._TQ_CLIENT.close()
        tq.interface._TQ_CLIENT = tq.interface._TQ_CONTROLLER = None

    def put_rollouts(self) -> None:
        self._put(self.put_keys, self.mine)

    def put_logprobs(self, field: str) -> None:
        self._get(INTS)
        self._put(self.get_keys, {field: self.floats[field]})

    def get_all(self) -> int:
        # Advantages are computed where they are read: they do not travel.
        return int(self._get((*INTS, "old_logprobs", "ref_logprobs"))["tokens"].values().sum())

    def clear(self) -> None:
        tq.kv_clear(keys=self.put_keys, partition_id=PARTITION)

    def _put(self, keys: list[str], fields: dict[str, torch.Tensor]) -> None:
        tq.kv_batch_put(keys=keys, partition_id=PARTITION, fields=TensorDict(fields, batch_size=len(keys)))

    def _get(self, fields: tuple[str, ...]) -> TensorDict:
        return tq.kv_batch_get(keys=self.get_keys, partition_id=PARTITION, select_fields=list(fields))


class Cluster:
    """The actors, one on each node; nodes may join between two requests."""

    def __init__(self) -> None:
        self.peers: dict[str, ray.actor.ActorHandle] = {}  # address of the node → its actor

    def first(self, hosts: int) -> list[ray.actor.ActorHandle]:
        nodes = {n["NodeManagerAddress"]: n["NodeID"] for n in ray.nodes() if n["Alive"]}
        addresses = sorted(nodes, key=lambda a: [int(x) for x in a.split(".")])[:hosts]
        for address in addresses:
            if address not in self.peers:
                near = NodeAffinitySchedulingStrategy(nodes[address], soft=False)
                self.peers[address] = Peer.options(scheduling_strategy=near).remote()
        peers = [self.peers[a] for a in addresses]
        ray.get([p.__ray_ready__.remote() for p in peers])
        return peers


class Verl:
    """The driver has the whole batch: it gathers what a stage writes, and deals out what the next one reads."""

    def __init__(self, peers: list, method: str) -> None:
        os.environ[METHOD] = self.method = method
        self.peers = peers
        self.group = RayWorkerGroup.from_detached(worker_handles=peers, ray_cls_with_init=RayClassWithInitArgs(Peer))

    def step(self, rows: int, tokens: int) -> int:
        n, group = len(self.peers), self.group
        batch = group.generate()
        seen = [PIXELS] if PIXELS in batch.non_tensor_batch else []
        if not seen:
            batch.reorder(deal(n, rows).flatten())
        for field in ("old_logprobs", "ref_logprobs"):
            ready = batch.select(batch_keys=list(INTS), non_tensor_batch_keys=seen)
            ready.meta_info["writes"] = field
            batch = batch.union(group.logprobs(ready))
        batch.batch["advantage"] = torch.zeros(n * rows, tokens)  # verl computes them on the driver
        return sum(group.update(batch))

    def clear(self) -> None:
        pass

    def close(self) -> None:
        pass


class Queue:
    """The driver calls the stages, and they put and get the samples."""

    method = "numpy"

    def __init__(self, peers: list) -> None:
        self.peers = peers
        storage = {"storage_backend": "SimpleStorage", "SimpleStorage": {"num_data_storage_units": len(peers)}}
        tq.init(OmegaConf.create({"backend": storage}))
        self._everybody("join")

    def step(self, rows: int, tokens: int) -> int:
        self._everybody("put_rollouts")
        for field in ("old_logprobs", "ref_logprobs"):
            self._everybody("put_logprobs", field)
        return sum(self._everybody("get_all"))

    def clear(self) -> None:
        self._everybody("clear")

    def close(self) -> None:
        self._everybody("leave")
        tq.close()

    def _everybody(self, method: str, *args: str) -> list:
        return ray.get([getattr(p, method).remote(*args) for p in self.peers])


def run_steps(peers: list, system: Verl | Queue, rows: int, tokens: int, steps: int, pixels: dict) -> list[float]:
    """Returns the seconds of each step. One with few tokens comes before, which starts what a system needs."""
    seconds = []
    for length in [16] + steps * [tokens]:
        given = len(peers), rows, length, system.method, pixels
        sums = ray.get([p.prepare.remote(r, *given) for r, p in enumerate(peers)])
        start = time.perf_counter()
        total = system.step(rows, length)
        seconds.append(time.perf_counter() - start)
        assert total == sum(sums)
        system.clear()
    return seconds[1:]


def main() -> None:
    serve.keep_stdout_for_answers()
    env = {"env_vars": {"OMP_NUM_THREADS": "1", "TQ_NUM_THREADS": "2", "TQ_CLIENT_ZMQ_IO_THREADS": "2"}}
    ray.init(address=sys.argv[1], runtime_env=env, log_to_driver=False, logging_level="ERROR")
    cluster = Cluster()
    versions = ", ".join(f"{p} {version(p)}" for p in ("verl", "TransferQueue", "ray", "torch"))
    print(json.dumps({"version": versions}), file=serve._answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        peers = cluster.first(request["hosts"])
        name = request["system"]
        system = Queue(peers) if name == "transferqueue" else Verl(peers, "numpy" if name == "verl, numpy" else "")
        try:
            seconds = run_steps(
                peers, system, request["rows"], request["tokens"], request["steps"], request.get("pixels", {})
            )
        finally:
            system.close()
        print(json.dumps({"s": seconds}), file=serve._answers, flush=True)


if __name__ == "__main__":
    main()
