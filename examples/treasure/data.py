"""Writes boards: moves of somebody who wanders about for the warm-up, boards to train on, and held-out ones."""

import json
import random
import sys
from itertools import product
from pathlib import Path
from typing import Any

from game import SIZE, STEPS


def boards() -> list[dict[str, Any]]:
    """Returns all pairs of different squares, in a fixed shuffled order."""
    squares = list(product(range(SIZE), repeat=2))
    pairs = [(start, treasure) for start, treasure in product(squares, squares) if start != treasure]
    random.Random(0).shuffle(pairs)
    return [
        {"prompt": f"treasure {t[0]},{t[1]} at {s[0]},{s[1]}: ", "start": list(s), "treasure": list(t)}
        for s, t in pairs
    ]


def write(folder: Path, held_out: int = 100) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rows, rng = boards(), random.Random(1)
    parts = {
        "held_out": rows[:held_out],
        "train": rows[held_out:],
        "warmup": [{**row, "response": rng.choice("".join(STEPS))} for row in rows[held_out:] * 8],
    }
    for name, part in parts.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
