"""Weights of some steps before are synced while other ranks still work on the step before."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from cases import Source
from distflow.batch.batch import Batch
from distflow.batch.context import Context
from distflow.comm.collectives import SendReceive
from distflow.coordinator.coordinator import Coordinator
from distflow.dataset.loader import Loader
from distflow.flow import Flow, Node
from distflow.observe.metrics import MetricsReducer, StepMetrics
from distflow.plan import Move, Place, Placement, Plan, Workload, plan
from distflow.plan.staleness import weights_after
from distflow.roles.role import Role
from distflow.run.async_comm import AsyncComm, CommThread
from distflow.run.comm import Comm
from distflow.run.versions import Versions
from distflow.run.worker import Worker
from hub import Hub
from limits import load_factor

STEPS = 6


class Begun:
    """The step that generation has come to; whoever waits for one fails after a minute."""

    def __init__(self) -> None:
        self.step, self.changed = 0, threading.Condition()

    def reach(self, step: int) -> None:
        with self.changed:
            self.step = max(self.step, step)
            self.changed.notify_all()

    def wait(self, step: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.step >= step, 60), f"step {step} has not begun"


class Actor(Role):
    def __init__(self, begun: Begun) -> None:
        self.begun = begun

    def copy_weights(self) -> None:
        return None

    def sync_weights(self, version: int, weights: Any = None) -> Iterator[SendReceive]:
        yield from ()

    def generate(self, batch: Batch, ctx: Context) -> list[int]:
        self.begun.reach(ctx.step)
        return [int(i) for i in batch.ids]

    def update(self, batch: Batch, ctx: Context) -> None:
        ctx.metrics.log("trained", len(batch), reduce="sum")


class Judge(Role):
    def __init__(self, begun: Begun) -> None:
        self.begun = begun

    def score(self, batch: Batch, ctx: Context) -> list[int]:
        self.begun.wait(min(STEPS, ctx.step + 1))  # is busy with this step when the next one has begun
        return [int(x) for x in batch["x"]]


def make_plan(delay: int, *before: Node, chunk: int | None = None) -> Plan:
    reads = before[0].writes if before else ("d0.text",)
    nodes = (
        *before,
        Node("generate", "actor", "inference", reads, ("x",), fn=Actor.generate, generates=True, method=True),
        Node("score", "judge", "inference", ("x",), ("y",), fn=Judge.score, method=True),
        Node("update", "actor", "train", ("x", "y"), (), fn=Actor.update, method=True),
    )
    places = {"generate": Place("rollout"), "score": Place("judge"), "update": Place("train")}
    places |= {n.id: Place("judge") for n in before}
    flow = Flow("late scores", Source.column_names, nodes)
    ranks = {"rollout": "0-1", "judge": "2", "train": "3"}
    return plan(flow, Placement(4, ranks, nodes=places), Workload(4, 1), staleness=delay, chunk=chunk)


@pytest.mark.parametrize(("delay", "chunk"), [(1, None), (2, None), (2, 2)])
def test_a_step_is_generated_while_the_one_before_is_scored(delay: int, chunk: int | None) -> None:
    p, begun = make_plan(delay, chunk=chunk), Begun()
    hub, errors, rows = Hub(p.workers), list[BaseException](), list[dict[str, float]]()

    def work(rank: int) -> None:
        roles: dict[str, Role] = {"actor": Actor(begun), "judge": Judge(begun)}
        data = Coordinator(rank, p, Loader(Source(), p.samples, 1, seed=0))
        worker = Worker(data, Comm(rank, p, roles, Versions(delay, last=STEPS)))
        reducer = MetricsReducer(rank, range(p.workers), (lambda step, row: rows.append(row)) if rank == 0 else None)
        comm = AsyncComm(worker, None, reducer, CommThread(lambda c: hub.run(rank, c)))
        comm.start()

        def after_step(step: int, metrics: StepMetrics) -> Any:
            return comm.reduce(reducer, step, metrics, False)

        try:
            list(worker.steps(lambda *_: None, after_step, comm.after_chain))
            assert not comm.mail._values
            reducer.wait()
        except BaseException as e:
            errors.append(e)
        reducer.close()

    threads = [threading.Thread(target=work, args=(r,), daemon=True) for r in range(p.workers)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(120 * load_factor())
    assert not errors, errors[0]
    assert [row["trained"] for row in rows] == [p.samples] * STEPS


def test_they_are_handed_over_once_those_that_generate_have_sent_everything() -> None:
    p = make_plan(1)
    place = weights_after(p)
    assert place is not None
    assert {m.id for m in p.tasks[:place] if isinstance(m, Move)} == {
        m.id for m in p.moves if m.src.layout.ranks == (0, 1)
    }
    assert any(isinstance(t, Move) for t in p.tasks[place:])  # scores go to training later


def test_without_a_delay_or_if_those_that_generate_wait_for_others_they_have_their_own_place() -> None:
    rewrite = Node("rewrite", reads=("d0.text",), writes=("prompt",))
    assert weights_after(make_plan(0)) is None
    assert weights_after(make_plan(1, rewrite)) is None
