"""How a worker says why it ended: one small file per rank, so that the one cause is told and not its N echoes."""

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["mistake", "node", "cause", "stuck", "echo"]


@dataclass(frozen=True)
class Report:
    """`mistake`: what the user has to mend before the first step; `node`: their code or data failed in a step;
    `cause`: anything else that was raised; `echo`: this worker only noticed that another one is gone."""

    rank: int
    kind: Kind
    message: str
    step: int = -1
    time: float = 0.0

    def save(self, folder: Path) -> bool:
        """Whether it could be written: the disk may be full, and that the cause."""
        path = folder / f"{self.rank}.error"
        temporary = path.with_suffix(".part")
        try:
            temporary.write_text(json.dumps(asdict(self) | {"time": time.time()}))
            temporary.rename(path)
        except OSError:
            return False
        return True


def read_reports(folder: Path) -> list[Report]:
    """Causes first, then stuck waits, then echoes; each in the order of time."""
    found = [Report(**json.loads(p.read_text())) for p in folder.glob("*.error")]
    order = {"stuck": 1, "echo": 2}
    return sorted(found, key=lambda r: (order.get(r.kind, 0), r.time))
