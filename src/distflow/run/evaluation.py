"""Evaluation on held-out prompts between steps: another flow, run by the same workers with the same roles."""

import time

from distflow.comm.collectives import Communication
from distflow.observe.metrics import StepMetrics
from distflow.run.worker import Worker

HELD_OUT = "val/"


class Evaluation:
    """Runs before the first step (0), every `every` steps, and after the last one."""

    def __init__(self, worker: Worker, every: int, steps: int) -> None:
        self.worker, self.every, self.steps = worker, every, steps

    def due(self, step: int) -> bool:
        return step % self.every == 0 or step >= self.steps

    def __call__(self, step: int, metrics: StepMetrics) -> Communication[None]:
        if not self.due(step) or not self.worker.chain:
            return
        eval_metrics, start = StepMetrics(), time.perf_counter()
        yield from self.worker.run_chain(step, eval_metrics)
        self.worker.data.check_freed(step)
        self.worker.comm.end_step(self.worker.data, step, eval_metrics)
        metrics.totals |= {key: value for key, value in eval_metrics.totals.items() if key[0].startswith(HELD_OUT)}
        metrics.time("eval", time.perf_counter() - start)
