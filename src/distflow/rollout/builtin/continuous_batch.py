"""One continuous batch: sequences join it, run in lockstep, and leave it as they finish."""

from collections.abc import Iterable

import torch

from distflow.rollout.builtin.model_runner import ModelRunner
from distflow.rollout.builtin.scheduler import Scheduler
from distflow.rollout.builtin.sequence import Sequence
from distflow.rollout.engine import Wake, never


class ContinuousBatch:
    def __init__(self, scheduler: Scheduler, runner: ModelRunner) -> None:
        self.scheduler, self.runner = scheduler, runner

    @property
    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished

    @property
    def unfinished(self) -> list[Sequence]:
        return [*self.scheduler.running, *self.scheduler.waiting]

    def add(self, sequences: Iterable[Sequence]) -> None:
        self.scheduler.add(sequences)

    @torch.inference_mode()
    def step(self, wake: Wake = never) -> list[Sequence]:
        """Runs until at least one sequence is finished, or `wake` is true, and returns all that are finished."""
        finished: list[Sequence] = []
        woken = False
        while self.scheduler.has_unfinished and not finished and not woken:
            for prompts in self.scheduler.admit():
                self.runner.prefill(prompts)
            finished += self.scheduler.retire()  # a response may be one token long
            if self.scheduler.running:
                self.runner.decode(*self.scheduler.ready())
                finished += self.scheduler.retire()
            finished = [s for s in finished if not s.aborted]
            woken = wake()
        return finished
