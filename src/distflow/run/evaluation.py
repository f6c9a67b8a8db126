"""Judging the model on held-out prompts in between: another flow, walked by the same workers with the same roles."""

import time
from collections.abc import Generator

from torch import Tensor

from distflow.data.exchange import Collective
from distflow.observe.metrics import StepMetrics
from distflow.run.worker import Worker

HELD_OUT = "val/"


class Evaluation:
    """Due before the first step (−1), every `every` steps, and after the last one."""

    def __init__(self, worker: Worker, every: int, steps: int) -> None:
        self.worker, self.every, self.steps = worker, every, steps

    def due(self, step: int) -> bool:
        return step < 0 or (step + 1) % self.every == 0 or step == self.steps - 1

    def __call__(self, step: int, metrics: StepMetrics) -> Generator[Collective, Tensor, None]:
        if not self.due(step):
            return
        own, began = StepMetrics(), time.perf_counter()
        yield from self.worker.walk(0, own, now=step)
        self.worker.data.end(0)
        metrics.totals |= {key: value for key, value in own.totals.items() if key[0].startswith(HELD_OUT)}
        metrics.time("eval", time.perf_counter() - began)
