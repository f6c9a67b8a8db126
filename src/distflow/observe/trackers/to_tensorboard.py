"""TensorBoard: event files in `tensorboard` in the run's folder; samples as text."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from distflow.observe.trackers.tracker import COLUMNS, RunInfo


class TensorBoard:
    def __init__(self, run: RunInfo) -> None:
        self.folder = str(run.folder / "tensorboard")
        # Events of steps that a resumed run repeats are hidden by `purge_step`.
        self.writer = self._open(run.first + 1 if run.first else None)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        with self._writer() as writer:
            for name, value in metrics.items():
                writer.add_scalar(name, value, step)

    def samples(self, step: int, rows: Sequence[Sequence[Any]]) -> None:
        lines = ["|".join(COLUMNS), "|".join("-" for _ in COLUMNS)]
        lines += ["|".join(str(c).replace("|", "\\|").replace("\n", " ") for c in row) for row in rows]
        with self._writer() as writer:
            writer.add_text("samples", "\n".join(lines), step)

    def close(self) -> None:
        if self.writer:
            self.writer.close()

    def _open(self, purge_step: int | None) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(self.folder, purge_step=purge_step)

    @contextmanager
    def _writer(self) -> Iterator[Any]:
        """Gives a writer, another one after an error: the thread of one that could not write has ended."""
        self.writer = self.writer or self._open(None)
        try:
            yield self.writer
            self.writer.flush()
        except Exception:
            self.writer = None
            raise


open_tracker = TensorBoard
