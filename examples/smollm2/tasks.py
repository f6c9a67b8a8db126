"""Writes tasks of reasoning-gym, new ones of each kind for training and for the held-out set.

pip install reasoning-gym && python examples/smollm2/tasks.py runs/smollm2
"""

import json
import sys
from pathlib import Path
from typing import Any

from distflow.reward.reasoning_gym import rows

KINDS: dict[str, dict[str, Any]] = {
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
    "products": {"min_digits": 1, "max_digits": 1},
    "needle_haystack": {"min_num_statements": 3, "max_num_statements": 5},
    "family_relationships": {},
}


def write(folder: Path, train: int = 120, held_out: int = 16) -> None:
    """Writes tasks of every kind: no held-out question is among those to train on."""
    written: dict[str, list[dict[str, Any]]] = {"tasks": [], "held_out_tasks": []}
    for kind, options in KINDS.items():
        unique = {task["prompt"]: task for task in rows(kind, 4 * (train + held_out), seed=1, **options)}
        tasks = [{**task, "prompt": [{"role": "user", "content": text}]} for text, task in unique.items()]
        written["held_out_tasks"] += tasks[:held_out]
        written["tasks"] += tasks[held_out : held_out + train]
    folder.mkdir(parents=True, exist_ok=True)
    for name, tasks in written.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
