"""Evaluation on held-out prompts between steps: another flow, run by the same workers with the same roles."""

import time

from distflow.data.collectives import Communication
from distflow.observe.metrics import StepMetrics
from distflow.run.worker import Worker

HELD_OUT = "val/"


class Evaluation:
    """Runs before the first step (−1), every `every` steps, and after the last one."""

    def __init__(self, worker: Worker, every: int, steps: int) -> None:
        self.worker, self.every, self.steps = worker, every, steps

    def due(self, step: int) -> bool:
        return step < 0 or (step + 1) % self.every == 0 or step == self.steps - 1

    def __call__(self, step: int, metrics: StepMetrics) -> Communication[None]:
        if not self.due(step):
            return
        eval_metrics, start = StepMetrics(), time.perf_counter()
        yield from self.worker.run_chain(0, eval_metrics, run_step=step)
        self.worker.data.end_step(0)
        metrics.totals |= {key: value for key, value in eval_metrics.totals.items() if key[0].startswith(HELD_OUT)}
        metrics.time("eval", time.perf_counter() - start)
