"""A treasure hunt with a compass, on 5 × 5 squares: the model makes a move, hears what the compass says, and so on.

`python game.py FOLDER` writes moves of a confused teacher for the warm-up, boards to train on, and held-out ones.
"""

import json
import random
import sys
from itertools import product
from pathlib import Path
from typing import Any

SIZE, MOVES = 5, 8
STEPS = {"N": (0, 1), "S": (0, -1), "E": (1, 0), "W": (-1, 0)}


def compass(place: list[int], treasure: list[int]) -> str:
    """Returns what the hunter is told: the direction of the treasure, such as NE."""
    (x, y), (to_x, to_y) = place, treasure
    return "S" * (to_y < y) + "N" * (to_y > y) + "W" * (to_x < x) + "E" * (to_x > x)


class Hunt:
    """An environment as skyrl-gym has them (`BaseTextEnv`); nothing of it has to be installed."""

    def __init__(self, env_config: Any = None, extras: dict[str, Any] | None = None) -> None:
        row = extras or {}
        self.place, self.treasure, self.moves = list(row["start"]), list(row["treasure"]), 0

    def init(self, prompt: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        return prompt, {}

    def step(self, action: str) -> dict[str, Any]:
        self.moves += 1
        before, change = self._distance(), STEPS.get(action.strip(), (0, 0))
        self.place = [min(SIZE - 1, max(0, old + step)) for old, step in zip(self.place, change, strict=True)]
        left = self._distance()
        return {
            "observations": [{"role": "user", "content": f" compass {compass(self.place, self.treasure)}: "}],
            "reward": (before - left) / MOVES,  # for each step in the right direction
            "done": not left or self.moves == MOVES,
            "metadata": {},
        }

    def get_metrics(self) -> dict[str, float]:
        return {"found": float(not self._distance())}

    def _distance(self) -> int:
        return sum(abs(a - b) for a, b in zip(self.place, self.treasure, strict=True))


def boards() -> list[dict[str, Any]]:
    """Returns all pairs of different squares, in a fixed shuffled order."""
    squares = [list(square) for square in product(range(SIZE), repeat=2)]
    pairs = [(start, treasure) for start, treasure in product(squares, squares) if start != treasure]
    random.Random(0).shuffle(pairs)
    return [{"prompt": f"compass {compass(s, t)}: ", "start": s, "treasure": t} for s, t in pairs]


def confused_game(board: dict[str, Any], rng: random.Random) -> list[dict[str, str]]:
    """Plays a game like somebody who holds the compass upside down more often than not; returns its moves."""
    opposite = dict(zip("NSEW", "SNWE", strict=True))
    hunt, said, moves, done = Hunt(extras=board), board["prompt"], list[dict[str, str]](), False
    while not done:
        move = rng.choice(compass(hunt.place, hunt.treasure))
        move = opposite[move] if rng.random() < 0.6 else move
        moves.append({"prompt": said, "response": move})
        result = hunt.step(move)
        said, done = f"{said}{move}<eos>{result['observations'][0]['content']}", result["done"]
    return moves


def write(folder: Path, held_out: int = 100) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rows, rng = boards(), random.Random(1)
    warmup = [move for row in rows[held_out:] for move in confused_game(row, rng)]
    rng.shuffle(warmup)
    for name, part in {"held_out": rows[:held_out], "train": rows[held_out:], "warmup": warmup}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
