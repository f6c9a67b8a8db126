"""TensorBoard: event files in `tensorboard` in the run's folder; samples as text."""

from collections.abc import Mapping, Sequence
from typing import Any

from distflow.observe.trackers.tracker import COLUMNS, RunInfo


class TensorBoard:
    def __init__(self, run: RunInfo) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Events of steps that a resumed run repeats are hidden by `purge_step`.
        purge = run.first + 1 if run.first else None
        self.writer = SummaryWriter(str(run.folder / "tensorboard"), purge_step=purge)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def samples(self, step: int, rows: Sequence[Sequence[Any]]) -> None:
        lines = ["|".join(COLUMNS), "|".join("-" for _ in COLUMNS)]
        lines += ["|".join(str(c).replace("|", "\\|").replace("\n", " ") for c in row) for row in rows]
        self.writer.add_text("samples", "\n".join(lines), step)

    def close(self) -> None:
        self.writer.close()


open_tracker = TensorBoard
