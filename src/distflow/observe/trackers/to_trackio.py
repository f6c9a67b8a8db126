"""trackio: its database in TRACKIO_DIR, else in `trackio` in the run's folder; samples as a table."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from distflow.observe.trackers.tracker import COLUMNS, RunInfo


class Trackio:
    def __init__(self, run: RunInfo) -> None:
        os.environ.setdefault("TRACKIO_DIR", str(run.folder.resolve() / "trackio"))  # read when it is imported
        import trackio

        self.trackio = trackio
        config = {k: v for k, v in run.config.items() if isinstance(v, int | float | str | None)}
        project, name = run.settings.get("project") or "distflow", run.settings.get("name") or run.name
        self.run = trackio.init(project=project, name=name, config=config, resume="allow", embed=False)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.trackio.log(dict(metrics), step=step)

    def samples(self, step: int, rows: Sequence[Sequence[Any]]) -> None:
        table = self.trackio.Table(columns=list(COLUMNS), data=[list(row) for row in rows])
        self.trackio.log({"samples": table}, step=step)

    def close(self) -> None:
        self.trackio.finish()


open_tracker = Trackio
