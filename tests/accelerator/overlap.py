"""Ranks that generate ahead, on the device: the worker's two threads, with a stream each and weights between them."""

from collections.abc import Iterator, Mapping
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from accelerator.rehearse import DEVICE
from cases import Source as Rows
from distflow.batch.batch import Batch
from distflow.batch.context import Context
from distflow.comm.collectives import SendReceive
from distflow.coordinator.coordinator import Coordinator
from distflow.dataset.loader import Loader
from distflow.flow import Flow, Node
from distflow.observe.metrics import MetricsReducer
from distflow.plan import Layout, Place, Placement, Workload, plan
from distflow.plan.topology import Topology
from distflow.roles.role import Role
from distflow.run.async_comm import AsyncComm, CommThread
from distflow.run.comm import Comm
from distflow.run.versions import Versions
from distflow.run.worker import Worker
from distflow.weights import sync
from distflow.weights.shards import Shards, TensorSpec
from distflow.weights.sync import WeightSync
from spawn import make_transport

STEPS = 4
GENERATES, TRAINS = (Shards(Layout((rank,), 1, 1), 1) for rank in (0, 1))
SPECS = [TensorSpec(f"w{i}", (64, 8), None) for i in range(6)]  # in several buckets


class Actor(Role):
    """A model whose weights are all the number of its updates."""

    def __init__(self, rank: int) -> None:
        device = torch.device(DEVICE)
        self.rank = rank
        self.weights = {s.name: torch.zeros(s.shape, device=device) for s in SPECS}
        with patch.object(sync, "_DEVICE_BUCKET", 4096):
            self.transfer = WeightSync(SPECS, TRAINS, GENERATES, rank, torch.float32, Topology.single(2), device)

    def copy_weights(self) -> Mapping[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.weights.items()}

    def sync_weights(self, version: int, weights: Any = None) -> Iterator[SendReceive]:
        held, filled = ({}, self.weights) if self.rank == 0 else (weights, {})
        yield from self.transfer.run(held, filled)

    def generate(self, batch: Batch) -> list[float]:
        values = torch.stack([w.mean() for w in self.weights.values()])
        assert float(values.min()) == float(values.max())
        return [float(values[0])] * len(batch)

    def update(self, batch: Batch, ctx: Context) -> None:
        assert batch["x"].tolist() == [max(0, ctx.step - 2)] * len(batch)
        for tensor in self.weights.values():
            tensor += 1


def overlap(rank: int) -> None:
    """Runs steps on two workers, of which one generates with the weights that the other had two updates before."""
    nodes = (
        Node("generate", "actor", "inference", ("d0.text",), ("x",), fn=Actor.generate, generates=True, method=True),
        Node("update", "actor", "train", ("x",), (), fn=Actor.update, method=True),
    )
    places = {"generate": Place("first"), "update": Place("last")}
    flow = Flow("ahead", Rows.column_names, nodes)
    p = plan(flow, Placement(2, {"first": "0", "last": "1"}, nodes=places), Workload(4, 1), staleness=1)
    data = Coordinator(rank, p, Loader(Rows(), p.samples, 1, seed=0))
    actor = Actor(rank)
    worker = Worker(data, Comm(rank, p, {"actor": actor}, Versions(1, last=STEPS)))
    reducer = MetricsReducer(rank, range(2), None)
    transport = make_transport(dist.get_rank(), 2, DEVICE)
    comm = AsyncComm(worker, None, reducer, CommThread(transport.run, device=torch.device(DEVICE)))
    comm.start()
    try:
        list(worker.steps(lambda *_: None, lambda s, m: comm.reduce(reducer, s, m, False), comm.after_chain))
        assert np.isclose(float(actor.weights["w0"].mean()), STEPS if rank == 1 else STEPS - 2)
    finally:
        reducer.close()
        data.close()
        transport.close()
