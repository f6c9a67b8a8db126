"""A calculator as two tools, as TRL takes them, and a reward for right answers.

`python calculator.py FOLDER` writes examples of a careless teacher for the warm-up, tasks to train on, held-out ones.
"""

import json
import random
import sys
from itertools import product
from pathlib import Path
from typing import Any


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


def multiply(a: int, b: int) -> int:
    """Multiplies two numbers.

    Args:
        a: the first
        b: the second
    """
    return a * b


def is_right(completions: list[list[dict[str, Any]]], answer: list[str], **columns: Any) -> list[float]:
    """Scores 1 for a conversation whose last message is the answer."""
    return [float(c[-1]["content"].strip() == a) for c, a in zip(completions, answer, strict=True)]


def tasks() -> list[dict[str, Any]]:
    """Returns all sums and products of two digits, in a fixed shuffled order."""
    rows = []
    for a, b, sign in product(range(10), range(10), "+*"):
        rows.append({"prompt": f"{a}{sign}{b}=", "a": a, "b": b, "answer": str(a + b if sign == "+" else a * b)})
    random.Random(0).shuffle(rows)
    return rows


def careless(task: dict[str, Any], rng: random.Random) -> list[dict[str, str]]:
    """Returns two turns of a teacher who uses the wrong tool more often than not: the call, and the answer."""
    tool = add if (task["prompt"][1] == "+") == (rng.random() < 0.4) else multiply
    call = json.dumps({"name": tool.__name__, "arguments": {"a": task["a"], "b": task["b"]}})
    said, result = f"<tool_call>{call}</tool_call>", str(tool(task["a"], task["b"]))
    return [
        {"prompt": task["prompt"], "response": said},
        {"prompt": f"{task['prompt']}{said}<eos>{result}", "response": result},
    ]


def write(folder: Path, held_out: int = 40) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rows, rng = tasks(), random.Random(1)
    warmup = [turn for _ in range(10) for row in rows[held_out:] for turn in careless(row, rng)]
    rng.shuffle(warmup)
    for name, part in {"held_out": rows[:held_out], "train": rows[held_out:], "warmup": warmup}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
