"""How often the host waits for the device in a step is a constant: while it waits, the device has nothing to do."""

from dataclasses import dataclass, replace

import pytest

from accelerator.rehearsal_device import WAIT, calls
from accelerator.rehearse import DEVICE, REHEARSED, rehearse
from accelerator.scenarios import Case, infer, make_trainer, update
from distflow.model.source import Source
from tiny import config_of

pytestmark = pytest.mark.skipif(not REHEARSED, reason="counts what the rehearsal's device does")


@dataclass(frozen=True)
class Sized(Case):
    layers: int = 2
    micro_tokens: int = 1000
    steps: int = 2  # of the optimiser

    @property
    def source(self) -> Source:
        source = replace(Case(self.arch).source, config=config_of(self.arch, num_hidden_layers=self.layers))
        return source.with_value_head() if self.values else source


def waits(rank: int, case: Sized) -> tuple[int, int]:
    """Returns how often the host waits in log-probs and an update of one step, and in how many micro-batches."""
    trainer = make_trainer(rank, case, DEVICE)
    trainer.config = trainer.config.model_copy(update={"micro_tokens": case.micro_tokens})
    update(trainer, rank, case)  # the first one makes the optimiser's state
    before, micro_batches = calls[WAIT], 0

    def count(*_: object) -> None:
        nonlocal micro_batches
        micro_batches += 1

    hook = trainer.model.register_forward_pre_hook(count)
    infer(trainer, rank, case)
    update(trainer, rank, case, case.steps)
    hook.remove()
    return calls[WAIT] - before, micro_batches


def all_waits(rank: int, cases: list[Sized]) -> list[tuple[int, int]]:
    return [waits(rank, case) for case in cases]


KINDS = {
    "one worker": Case(),
    "two workers": Case(dp=2, dtype="bfloat16", gradient_checkpointing=True),
    "a critic": Case(values=True),
}


@pytest.mark.parametrize("kind", KINDS)
def test_neither_micro_batches_nor_layers_nor_metrics_nor_steps_wait_for_the_device(kind: str) -> None:
    case = KINDS[kind]
    sizes: list[dict[str, int]] = [{}, {"micro_tokens": 12}, {"layers": 4}, {"steps": 4}]
    cases = [Sized(**{**vars(case), **size}) for size in sizes]
    for (few, micros), (many, more_micros), (deep, _), (often, _) in rehearse(case.dp * case.tp, all_waits, cases):
        assert more_micros >= 2 * micros
        assert few == many == deep == often
        assert few <= 16
