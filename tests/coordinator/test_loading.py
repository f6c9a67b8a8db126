"""While a step runs, the rows of the next one are read."""

from typing import Any

from distflow import Batch
from distflow.coordinator.coordinator import Coordinator
from distflow.dataset.loader import Loader
from distflow.flow import flow, node
from distflow.plan import Load, Placement, Workload, plan


@node(writes=())
def look(batch: Batch) -> None:
    batch["text"]


@flow
def looking(data):
    look(data)


class Counted:
    """Rows that count how often they are read."""

    column_names: tuple[str, ...] = ("text",)

    def __init__(self) -> None:
        self.reads = [0] * 8

    def __len__(self) -> int:
        return len(self.reads)

    def __getitem__(self, i: int) -> dict[str, Any]:
        self.reads[i] += 1
        return {"text": str(i)}


def test_the_rows_of_a_step_are_read_once_and_ahead_of_it() -> None:
    rows, planned = Counted(), plan(looking.trace(("text",)), Placement(1), Workload(2, 1))
    loader = Loader(rows, 2, 1, seed=0)
    coordinator = Coordinator(0, planned, loader)
    (load,) = (task for task in planned.tasks if isinstance(task, Load))
    for step in (1, 2, 3):
        coordinator.load(step, load)
    loader.load(3, 0, 1)  # of the fourth step, which has been read
    assert rows.reads == [1] * 8
