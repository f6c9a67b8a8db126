"""Chunks leave in the order in which they become complete, on which their ranks agree in O(log N) messages."""

import math
import random
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
from distflow.plan import Place, Placement, Plan, Split, Workload, plan
from distflow.roles.role import Role
from distflow.run.async_comm import AsyncComm, CommThread
from distflow.run.comm import Comm
from distflow.run.versions import Versions
from distflow.run.worker import Worker
from hub import Hub
from simulate import Traffic, simulate

CHUNKS = 4


class Actor(Role):
    """Lets each replica's chunks leave in `order`; the next one when `seen` has the one before."""

    def __init__(self, order: list[int], seen: list[int], changed: threading.Condition) -> None:
        self.order, self.seen, self.changed = order, seen, changed

    def copy_weights(self) -> None:
        return None

    def sync_weights(self, version: int, weights: Any = None) -> Iterator[SendReceive]:
        yield from ()

    def generate(self, batch: Batch, ctx: Context) -> list[float]:
        column = [float(i) for i in batch.ids]
        for place, i in enumerate(self.order if ctx.chunks else ()):
            assert ctx.chunks
            with self.changed:
                assert self.changed.wait_for(lambda n=place: len(self.seen) >= n, 60)  # type: ignore[misc]
            ctx.chunks.leave(i, {"x": [column[p] for p in ctx.chunks.parts[i]]})
        return column

    def update(self, batch: Batch, ctx: Context) -> None:
        ctx.metrics.log("trained", len(batch), reduce="sum")


class Judge(Role):
    def __init__(self, seen: list[int], changed: threading.Condition) -> None:
        self.seen, self.changed = seen, changed

    def score(self, batch: Batch, ctx: Context) -> list[float]:
        with self.changed:
            self.seen.append(int(batch.ids[0]))
            self.changed.notify_all()
        # Sums of such numbers depend on the order in which they are added.
        ctx.metrics.log("score", 0.1 * 3.0 ** int(min(batch.ids) % 7), len(batch))
        return [2 * float(x) for x in batch["x"]]


def make_plan(generate: int, judge: int, chunks: int, delay: int = 0) -> Plan:
    nodes = (
        Node("generate", "actor", "inference", ("d0.text",), ("x",), fn=Actor.generate, generates=True, method=True),
        Node("score", "judge", "inference", ("x",), ("y",), fn=Judge.score, method=True),
        Node("update", "actor", "train", ("y",), (), fn=Actor.update, method=True),
    )
    last = generate + judge
    ranks = {"rollout": f"0-{generate - 1}", "judge": f"{generate}-{last - 1}", "train": str(last)}
    places = {"generate": Place("rollout"), "score": Place("judge"), "update": Place("train")}
    flow = Flow("streaming", Source.column_names, nodes)
    chunk = math.lcm(generate, judge)
    workload = Workload(chunk * chunks, 1)
    return plan(flow, Placement(last + 1, ranks, nodes=places), workload, staleness=delay, chunk=chunk)


def run(order: list[int]) -> tuple[list[int], list[dict[str, float]]]:
    """Returns the chunks in the order in which they were scored, and the metrics of each step."""
    p, seen, changed = make_plan(1, 1, len(order)), list[int](), threading.Condition()
    hub, rows, errors = Hub(p.workers), list[dict[str, float]](), list[BaseException]()

    def work(rank: int) -> None:
        roles: dict[str, Role] = {"actor": Actor(order, seen, changed), "judge": Judge(seen, changed)}
        data = Coordinator(rank, p, Loader(Source(), p.samples, 1, seed=0))
        worker = Worker(data, Comm(rank, p, roles, Versions(last=1)))
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

    threads = [threading.Thread(target=work, args=(r,)) for r in range(p.workers)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors, errors[0]
    return seen, rows


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [2, 0, 3, 1], [3, 2, 1, 0]])
def test_a_chunk_leaves_when_it_is_complete_whatever_comes_before_it(order: list[int]) -> None:
    seen, rows = run(order)
    assert seen == order  # and each had left before the next one was complete
    assert rows[0]["trained"] == CHUNKS


def test_metrics_do_not_depend_on_the_order_to_the_bit() -> None:
    scores = {run(order)[1][0]["score"] for order in ([0, 1, 2, 3, 4, 5], [5, 3, 1, 0, 2, 4], [4, 5, 0, 3, 2, 1])}
    assert len(scores) == 1


@pytest.mark.parametrize(("generate", "judge"), [(1, 1), (3, 2), (12, 24), (64, 32)])
def test_all_ranks_agree_on_the_order_in_a_few_rounds_of_log_n_messages(generate: int, judge: int) -> None:
    rng, p = random.Random(generate), make_plan(generate, judge, 6)
    split = next(t for t in p.tasks if isinstance(t, Split))
    assert split.ranks == tuple(range(generate + judge))
    comms: dict[int, AsyncComm] = {}
    for rank in split.ranks:
        roles: dict[str, Role] = {
            "actor": Actor([], [], threading.Condition()),
            "judge": Judge([], threading.Condition()),
        }
        data = Coordinator(rank, p, Loader(Source(), p.samples, 1, seed=0))
        worker = Worker(data, Comm(rank, p, roles, Versions()))
        worker.chunk_tasks = {i: [] for i in range(6)}
        comms[rank] = AsyncComm(worker, None, MetricsReducer(rank, [rank], None), CommThread(lambda c: None))
        for place, chunk in enumerate(rng.sample(range(6), 6) if rank < generate else ()):
            comms[rank].mail.put((id(data), 1, "complete", place), chunk)

    traffic = Traffic()
    simulate({r: comm._chunks(comm.worker, 1, split) for r, comm in comms.items()}, traffic)
    orders = {
        tuple(comms[r].mail.take((id(comms[r].worker.data), 1, "chunk", i)) for i in range(6)) for r in split.readers
    }
    assert len(orders) == 1
    assert sorted(next(iter(orders))) == list(range(6))
    assert max(traffic.messages.values()) <= 6 * (generate + judge).bit_length()
