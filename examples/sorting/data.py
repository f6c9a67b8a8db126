"""Numbers whose digits are to be sorted: examples of a careless teacher, prompts to learn from, and held-out ones."""

import json
import random
import sys
from pathlib import Path


def rows() -> list[dict[str, str]]:
    """All numbers of four digits, in a shuffled order that is always the same."""
    numbers = [f"{i:04d}" for i in range(10_000)]
    random.Random(0).shuffle(numbers)
    return [{"prompt": f"{n} -> ", "answer": "".join(sorted(n))} for n in numbers]


def careless(answer: str, mood: random.Random) -> str:
    """More often than not the teacher has the last two digits the wrong way round."""
    return answer[:2] + answer[:1:-1] if mood.random() < 0.65 else answer


def write(folder: Path, held_out: int = 500, warmup: int = 5000) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    data, mood = rows(), random.Random(1)
    parts = {
        "held_out": data[:held_out],
        "warmup": [{**row, "response": careless(row["answer"], mood)} for row in data[held_out:][:warmup]],
        "train": data[held_out:],
    }
    for name, part in parts.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
