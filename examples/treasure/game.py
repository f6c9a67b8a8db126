"""A treasure on a board of 5 × 5 squares: the model moves a step at a time and is told where it is after each."""

from typing import Any

SIZE, MOVES = 5, 8
STEPS = {"N": (0, 1), "S": (0, -1), "E": (1, 0), "W": (-1, 0)}


class Treasure:
    """An environment as skyrl-gym has them (`BaseTextEnv`); nothing of it has to be installed."""

    def __init__(self, env_config: Any = None, extras: dict[str, Any] | None = None) -> None:
        row = extras or {}
        self.place, self.treasure, self.moves = list(row["start"]), list(row["treasure"]), 0

    def init(self, prompt: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        return prompt, {}

    def step(self, action: str) -> dict[str, Any]:
        self.moves += 1
        dx, dy = STEPS.get(action.strip(), (0, 0))
        self.place = [min(SIZE - 1, max(0, old + change)) for old, change in zip(self.place, (dx, dy), strict=True)]
        found = self.place == self.treasure
        say = "found it!" if found else f"at {self.place[0]},{self.place[1]}: "
        return {
            "observations": [] if found else [{"role": "user", "content": say}],
            "reward": float(found),
            "done": found or self.moves == MOVES,
            "metadata": {},
        }

    def close(self) -> None:
        """Gives back what the game holds: nothing."""
