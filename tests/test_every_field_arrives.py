"""Promise: every field arrives. Whatever a node writes, every reader gets, unchanged, across any redistribution."""

import random
from collections import Counter

import pytest
from cases import Rows, random_plan
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from simulate import simulate

from distflow.data.coordinator import Coordinator
from distflow.data.loader import Loader
from distflow.observe.metrics import Tally
from distflow.plan import Plan, Run
from distflow.worker import Worker


def run_simulated(plan: Plan, steps: int) -> list[Tally]:
    """All workers of a plan against each other; their tallies."""
    tallies: list[Tally] = []
    prompts = plan.samples // plan.repeat
    workers = {}
    for rank in range(plan.workers):
        data = Coordinator(rank, plan, Loader(Rows([{}] * 7), prompts, plan.repeat, seed=0))
        worker = Worker(rank, plan, data, {}, 0, lambda *_: None, lambda _, tally: tallies.append(tally))
        workers[rank] = worker.steps(0, steps)
    simulate(workers)
    return tallies


@settings(max_examples=2000, deadline=None, suppress_health_check=list(HealthCheck))
@given(rng=st.randoms(use_true_random=False), workers=st.sampled_from([1, 2, 3, 4, 6, 8]))
def test_every_reader_sees_what_the_writer_wrote(rng: random.Random, workers: int) -> None:
    plan = random_plan(rng, workers)
    steps = 2
    tallies = run_simulated(plan, steps)
    handled: Counter[str] = Counter()
    for tally in tallies:
        for (name, _), (total, _) in tally.totals.items():
            if name.startswith("samples/"):
                handled[name.removeprefix("samples/")] += int(total)
    for task in plan.tasks:
        if isinstance(task, Run):  # each replica handles each of its samples once
            assert handled[task.node] == steps * plan.samples * task.partition.layout.tp


def test_a_plan_out_of_order_deadlocks() -> None:
    """The simulation can fail: two ranks that take their moves in different order wait for each other."""
    from simulate import DeadlockError

    plan = next(
        p for p in (random_plan(random.Random(s), 4) for s in range(1000)) if len({m.ranks for m in p.moves}) > 1
    )
    moves = [m for m in plan.moves if len(m.ranks) > 1]
    first, second = next((a, b) for a in moves for b in moves if a.ranks != b.ranks and set(a.ranks) & set(b.ranks))
    shared = (set(first.ranks) & set(second.ranks)).pop()
    from distflow.data.exchange import AllGather
    import torch

    def walk(ranks_in_order):
        for ranks in ranks_in_order:
            yield AllGather(ranks, torch.zeros(1))

    orders = {r: [m.ranks for m in (first, second) if r in m.ranks] for r in set(first.ranks) | set(second.ranks)}
    simulate({r: walk(o) for r, o in orders.items()})
    orders[shared].reverse()
    other = next((r for r in orders if r != shared and len(orders[r]) == 2), None)
    if other is None:
        pytest.skip("the two moves share but one rank")
    with pytest.raises(DeadlockError):
        simulate({r: walk(o) for r, o in orders.items()})
