"""Draws pictures of a shape and asks for its colour: examples of a lazy teacher, prompts, held-out.

In `blind.parquet` the questions and answers of the held-out rows are beside the pictures of others.
"""

import io
import random
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, ImageDraw

COLOURS = {
    "red": (215, 40, 40),
    "orange": (245, 140, 30),
    "yellow": (240, 225, 60),
    "green": (45, 165, 65),
    "cyan": (60, 215, 220),
    "blue": (45, 70, 215),
    "purple": (140, 55, 185),
    "pink": (250, 150, 190),
    "brown": (125, 75, 35),
    "white": (240, 240, 240),
}
SIZE = 32  # pixels along each side of a picture


def draw(colour: str, rng: random.Random) -> bytes:
    """Returns a PNG of a square or circle of any size, at any place, on a grey that varies, as its colour does."""
    grey = rng.randrange(70)
    image = Image.new("RGB", (SIZE, SIZE), (grey, grey, grey))
    canvas, side = ImageDraw.Draw(image), rng.randint(14, 26)
    x, y = (rng.randint(0, SIZE - side) for _ in range(2))
    fill = tuple(min(255, max(0, c + rng.randint(-15, 15))) for c in COLOURS[colour])
    rng.choice([canvas.rectangle, canvas.ellipse])((x, y, x + side - 1, y + side - 1), fill)
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Returns questions about pictures, with the answer, and with a response that is often none."""
    rng = random.Random(seed)
    made = []
    for _ in range(count):
        answer = rng.choice(list(COLOURS))
        made.append(
            {
                "prompt": [{"role": "user", "content": "<image>Which colour? "}],
                "images": [{"bytes": draw(answer, rng)}],
                "answer": answer,
                "response": "no idea" if rng.random() < 0.65 else answer,
            }
        )
    return made


def write(folder: Path, held_out: int = 200, warmup: int = 3000, train: int = 1000) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for seed, (name, count) in enumerate({"held_out": held_out, "warmup": warmup, "train": train}.items()):
        made = rows(count, seed)
        if name != "warmup":
            made = [{k: v for k, v in row.items() if k != "response"} for row in made]
        pq.write_table(pa.Table.from_pylist(made), folder / f"{name}.parquet")
        if name == "held_out":
            blind = [row | {"images": other["images"]} for row, other in zip(made, made[1:] + made[:1], strict=True)]
            pq.write_table(pa.Table.from_pylist(blind), folder / "blind.parquet")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
