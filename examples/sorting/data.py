"""Writes numbers whose digits are to be sorted: examples of a careless teacher, training prompts, held-out prompts."""

import json
import random
import sys
from pathlib import Path


def rows() -> list[dict[str, str]]:
    """Returns all numbers of four digits, in a fixed shuffled order."""
    numbers = [f"{i:04d}" for i in range(10_000)]
    random.Random(0).shuffle(numbers)
    return [{"prompt": f"{n} -> ", "answer": "".join(sorted(n))} for n in numbers]


def careless(answer: str, rng: random.Random) -> str:
    """Swaps the last two digits more often than not."""
    return answer[:2] + answer[:1:-1] if rng.random() < 0.65 else answer


def write(folder: Path, held_out: int = 500, warmup: int = 5000) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    data, rng = rows(), random.Random(1)
    parts = {
        "held_out": data[:held_out],
        "warmup": [{**row, "response": careless(row["answer"], rng)} for row in data[held_out:][:warmup]],
        "train": data[held_out:],
    }
    for name, part in parts.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
