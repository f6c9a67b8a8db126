"""Promise: every field arrives. Whatever a node writes, every reader gets, unchanged, across any redistribution."""

import random
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cases import Source, random_plan
from distflow.coordinator.coordinator import Coordinator
from distflow.dataset.loader import Loader
from distflow.observe.metrics import StepMetrics
from distflow.plan import Plan, RunNode
from distflow.run.comm import Comm
from distflow.run.versions import Versions
from distflow.run.worker import Worker
from simulate import simulate


def run_simulated(plan: Plan, steps: int) -> list[StepMetrics]:
    """Runs all workers of a plan; returns the metrics of each of their steps."""
    results: list[StepMetrics] = []
    prompts = plan.samples // plan.repeat
    workers, coordinators = {}, []
    for rank in range(plan.workers):
        data = Coordinator(rank, plan, Loader(Source(), prompts, plan.repeat, seed=0))
        coordinators.append(data)
        worker = Worker(data, Comm(rank, plan, {}, Versions(last=steps)))
        workers[rank] = worker.steps(lambda _, metrics: results.append(metrics))
    simulate(workers)
    for data in coordinators:
        data.close()  # it has a thread
    return results


def check_random_plan(rng: random.Random, workers: int) -> None:
    plan = random_plan(rng, workers)
    steps = rng.choice([1, 1, 2])
    results = run_simulated(plan, steps)
    handled: Counter[str] = Counter()
    for metrics in results:
        for (name, _), (total, _) in metrics.totals.items():
            if name.startswith(("samples/", "replicas/")):
                handled[name] += int(total)
    for task in plan.tasks:
        if isinstance(task, RunNode):  # each replica handles each of its samples once; a sum counts the sample once
            for kind, replicas in (("samples", 1), ("replicas", task.partition.layout.replica_size)):
                once, count = steps * plan.samples * replicas, handled[f"{kind}/{task.node}"]
                assert count >= once if task.node in plan.flow.sampling_loop else count == once


CASES = {"rng": st.randoms(use_true_random=False), "workers": st.sampled_from([1, 2, 2, 3, 4, 4, 6, 8])}


@settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))
@given(**CASES)
def test_every_reader_sees_what_the_writer_wrote(rng: random.Random, workers: int) -> None:
    check_random_plan(rng, workers)


@pytest.mark.slow
@settings(max_examples=20_000, deadline=None, suppress_health_check=list(HealthCheck))
@given(**CASES)
def test_every_reader_sees_what_the_writer_wrote_at_length(rng: random.Random, workers: int) -> None:
    check_random_plan(rng, workers)
