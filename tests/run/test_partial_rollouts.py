"""Samples of later steps that are begun early belong to the same replica, come back, and survive on other layouts."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from cases import Source
from distflow.batch.batch import Batch, Column, Ragged
from distflow.batch.context import Context
from distflow.checkpoint.tensor_index import file_name
from distflow.coordinator.coordinator import Coordinator
from distflow.dataset.loader import Loader
from distflow.flow import Flow, Node
from distflow.observe.metrics import StepMetrics
from distflow.plan import Place, Placement, Plan, RunNode, Workload, plan
from distflow.roles.role import Role
from distflow.run.comm import Comm
from distflow.run.rollouts import Rollouts
from distflow.run.versions import Versions
from distflow.run.worker import Worker
from simulate import simulate

STEPS = 6


class Actor(Role):
    """Begins some of the samples ahead in every step, and checks that it gets back what it has begun."""

    def __init__(self, rank: int, repeat: int) -> None:
        self.rng, self.repeat = random.Random(rank), repeat
        self.begun: dict[int, int] = {}  # sample → how far it is
        self.generated: list[int] = []
        self.offered: list[int] = []  # samples ahead, in each step

    def copy_weights(self) -> None:
        return None

    def sync_weights(self, version: int, weights: Any = None) -> Any:
        yield from ()

    def generate(self, batch: Batch, ctx: Context) -> list[int]:
        assert ctx.partial is not None
        before, ahead = ctx.partial.begun, ctx.partial.ahead
        if before is None:
            assert not self.begun
        else:
            assert dict(zip(before.ids.tolist(), before["far"].tolist(), strict=True)) == self.begun
            assert [len(t) for t in before["tokens"]] == before["far"].tolist()
        assert set(self.begun) <= {*batch.ids.tolist(), *ahead.ids.tolist()}
        assert not set(ahead.ids.tolist()) & set(batch.ids.tolist())
        assert (ahead.groups == ahead.ids // self.repeat).all()
        assert len(ahead["d0.text"]) == len(ahead)
        self.offered.append(len(ahead))
        self.generated += batch.ids.tolist()
        kept = {i: far for i, far in self.begun.items() if i not in set(batch.ids.tolist())}
        self.begun = {i: kept.get(i, 0) + 1 for i in ahead.ids.tolist() if i in kept or self.rng.random() < 0.5}
        places = np.flatnonzero(np.isin(ahead.ids, list(self.begun)))
        far = [self.begun[i] for i in ahead.ids[places].tolist()]
        tokens = Ragged.packed(torch.zeros(sum(far), dtype=torch.int64), np.array(far, np.int64))
        columns: dict[str, Column] = {"far": torch.tensor(far, dtype=torch.int64), "tokens": tokens}
        ctx.partial.carry(Batch(ahead.ids[places], ahead.groups[places], columns))
        return batch.ids.tolist()

    def update(self, batch: Batch, ctx: Context) -> None:
        for i in batch["x"]:
            ctx.metrics.log(f"trained/{int(i)}", 1, reduce="sum")


def make_plan(replicas: int, prompts: int, repeat: int, ahead: int, delay: int = 1) -> Plan:
    nodes = (
        Node("generate", "actor", "inference", ("d0.text",), ("x",), fn=Actor.generate, generates=True, method=True),
        Node("update", "actor", "train", ("x",), (), fn=Actor.update, method=True),
    )
    ranks = {"rollout": f"0-{replicas - 1}", "train": str(replicas)}
    places = {"generate": Place("rollout"), "update": Place("train")}
    flow, work = Flow("partial", Source.column_names, nodes), Workload(prompts, repeat)
    return plan(flow, Placement(replicas + 1, ranks, nodes=places), work, staleness=delay, prompts_ahead=ahead)


def actor_of(worker: Worker) -> Actor:
    actor = worker.comm.roles["actor"]
    assert isinstance(actor, Actor)
    return actor


def make_worker(rank: int, p: Plan) -> Worker:
    roles = {"actor": Actor(rank, p.repeat)}
    data = Coordinator(rank, p, Loader(Source(), p.samples // p.repeat, p.repeat, seed=0))
    comm = Comm(rank, p, roles, Versions(p.staleness, last=STEPS))
    return Worker(data, comm, rollouts=Rollouts(p))


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize(("prompts", "ahead"), [(6, 6), (6, 1), (5, 4), (2, 7)])
def test_each_replica_begins_its_own_prompts_only_and_every_sample_is_trained_once(
    replicas: int, prompts: int, ahead: int
) -> None:
    p = make_plan(replicas, prompts, 2, ahead)
    workers = {r: make_worker(r, p) for r in range(p.workers)}
    metrics: list[StepMetrics] = []
    ends = {r: (lambda step, m: metrics.append(m)) for r in workers}
    simulate({r: w.steps(ends[r]) for r, w in workers.items()})
    trained = sorted(int(name.removeprefix("trained/")) for m in metrics for name, _ in m.totals if "trained" in name)
    assert trained == list(range(STEPS * p.samples))
    generated = [i for w in workers.values() for i in actor_of(w).generated]
    assert sorted(generated) == trained
    offered = [sum(x) for x in zip(*(actor_of(workers[r]).offered for r in range(replicas)), strict=True)]
    assert offered[0] == min(ahead, prompts * (STEPS - 1)) * 2 or replicas > prompts  # a replica has none
    assert offered[-1] == 0  # there is no step after the last one
    assert not any(w.data._loaded_ahead for w in workers.values())


@pytest.mark.parametrize(("prompts", "ahead"), [(12, 12), (7, 9), (3, 3), (2, 5)])
def test_what_is_carried_on_comes_back_to_the_replica_that_has_the_sample_now(
    prompts: int, ahead: int, tmp_path: Path
) -> None:
    step = 3
    for old, new in [(1, 1), (1, 3), (3, 1), (4, 3), (2, 8), (8, 3), (5, 4)]:
        folder = tmp_path / f"{old}-{new}"
        folder.mkdir()
        before = make_plan(old, prompts, 2, ahead)
        want: dict[int, int] = {}
        for replica in range(old):
            coordinator = make_worker(replica, before).data
            task = next(t for t in before.tasks if t.name == "generate")
            assert isinstance(task, RunNode)
            begun = coordinator.ahead(step, task, 100, coordinator.share_ahead(task))
            rollouts = Rollouts(before)
            rollouts.carry(step, Batch(begun.ids, begun.groups, {"far": torch.from_numpy(begun.ids)}))
            want |= dict.fromkeys(begun.ids.tolist(), replica)
            save_file(rollouts.tensors(step - 1), folder / file_name(replica))
            assert not rollouts.tensors(step)
        after = make_plan(new, prompts, 2, ahead)
        found: dict[int, int] = {}
        for replica in range(new):
            rollouts = Rollouts(after)
            rollouts.open(folder, {"staleness": 1, "places": old})
            layout = after.partition_of("generate").layout
            assert rollouts.begun(step, layout, replica) is None  # of another step
            begun = rollouts.begun(step + 1, layout, replica)  # type: ignore[assignment]
            owned = {
                i for k in range(4) for i in make_worker(replica, after).data.loader.load(step + k, replica, new)[0]
            }
            for i, far in zip(begun.ids.tolist(), begun["far"].tolist(), strict=True) if begun else ():
                assert i == far
                if i in owned:
                    assert i not in found
                    found[i] = replica
        assert found.keys() == want.keys()
