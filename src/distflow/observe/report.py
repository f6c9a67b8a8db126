"""How a worker says why it ended: one small file per rank, so that the one cause is told and not its N echoes."""

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["cause", "stuck", "echo"]


@dataclass(frozen=True)
class Report:
    """`echo`: this worker only noticed that another one is gone."""

    rank: int
    kind: Kind
    message: str
    time: float = 0.0

    def save(self, folder: Path) -> None:
        path = folder / f"{self.rank}.error"
        temporary = path.with_suffix(".part")
        temporary.write_text(json.dumps(asdict(self) | {"time": time.time()}))
        temporary.rename(path)


def read_reports(folder: Path) -> list[Report]:
    """Causes first, then stuck waits, then echoes; each in the order of time."""
    found = [Report(**json.loads(p.read_text())) for p in folder.glob("*.error")]
    order: dict[Kind, int] = {"cause": 0, "stuck": 1, "echo": 2}
    return sorted(found, key=lambda r: (order[r.kind], r.time))
