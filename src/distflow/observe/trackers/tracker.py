"""The tracker interface."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

COLUMNS = ("split", "id", "prompt", "response", "score", "advantage")  # of a table of samples


@dataclass(frozen=True)
class RunInfo:
    """Describes the run when a tracker is opened; `first`: the step after which a resumed run continues."""

    name: str
    folder: Path
    config: Mapping[str, Any]
    first: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)  # the tracker's in the config; None: not given


class Tracker(Protocol):
    """Called by one thread. An exception is reported, and the next entry is tried again."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def samples(self, step: int, rows: Sequence[Sequence[Any]]) -> None:
        """Takes some samples of a step, with the values of COLUMNS."""
        ...

    def close(self) -> None: ...


def sample_rows(samples: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """Returns recorded samples as rows of COLUMNS."""
    rows = []
    for sample in samples:
        values = {**sample, **sample["fields"]}
        cells = [values.get(column) for column in COLUMNS]
        rows.append([c if isinstance(c, int | float | str | None) else str(c)[:2000] for c in cells])
    return rows
