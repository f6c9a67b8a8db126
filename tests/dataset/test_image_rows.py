"""Rows with images, as TRL, verl and OpenAI's API have them, become messages and references."""

import base64
from pathlib import Path
from typing import Any

import pytest

from distflow.dataset.image_rows import image_of_row, row_of, with_images
from distflow.errors import DataError

BASE = Path("/data")
PNG = b"\x89PNG\r\n"
URL = "data:image/png;base64," + base64.b64encode(PNG).decode()
IMAGE = {"type": "image"}
HERE = "row:train:7:0"
ASKED = [{"role": "user", "content": [IMAGE, {"type": "text", "text": "What?"}]}]


def text(t: str) -> dict[str, str]:
    return {"type": "text", "text": t}


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


@pytest.mark.parametrize(
    ("row", "prompt", "images"),
    [
        # TRL
        ({"prompt": ASKED, "image": {"bytes": PNG, "path": None}}, ASKED, [HERE]),
        ({"prompt": [{"role": "user", "content": "What?"}], "images": ["a.png"]}, ASKED, ["/data/a.png"]),
        ({"prompt": "What?", "image": "a.png"}, ASKED, ["/data/a.png"]),
        # verl
        ({"prompt": user(text("<image>Is it <image>?")), "images": [{"bytes": PNG}, {"image": "file:///b%20c.png"}]},
         user(IMAGE, text("Is it "), IMAGE, text("?")), [HERE, "/b c.png"]),
        # OpenAI
        ({"prompt": user(text("What?"), {"type": "image_url", "image_url": {"url": URL, "detail": "low"}})},
         user(text("What?"), IMAGE), [HERE]),
        ({"prompt": user({"type": "image", "image": "a.png"}, IMAGE), "images": ["b.png"]},
         user(IMAGE, IMAGE), ["/data/a.png", "/data/b.png"]),
        # no images
        ({"prompt": "What is <image>?"}, "What is <image>?", []),
        ({"prompt": "What?", "images": []}, "What?", []),
        ({"prompt": "What?", "images": None}, "What?", []),
        ({"prompt": user(text("What"), text("?"))}, [{"role": "user", "content": "What?"}], []),
    ],
)  # fmt: skip
def test_a_row_becomes_messages_and_references(row: dict[str, Any], prompt: Any, images: list[str]) -> None:
    got = with_images({**row, "answer": "x"}, "train", 7, BASE)
    assert got == {"answer": "x", "prompt": prompt, "images": images}


def test_a_reference_to_a_row_finds_the_image_in_it() -> None:
    row = {"prompt": user(IMAGE, {"type": "image_url", "image_url": {"url": URL}}), "images": [{"bytes": b"other"}]}
    references = with_images(row, "train", 7, BASE)["images"]
    assert [image_of_row(row, place[2]) for r in references if (place := row_of(r))] == [b"other", PNG]
    assert row_of(references[0]) == ("train", 7, 0)
    assert row_of("/data/a.png") is None


@pytest.mark.parametrize(
    ("row", "error"),
    [
        ({"prompt": user(IMAGE, IMAGE), "images": [PNG]}, "2 places for images, and the row has 1"),
        ({"prompt": "<image> <image>", "images": [PNG]}, "2 places for images, and the row has 1"),
        ({"prompt": "<image>", "images": []}, "1 places for images, and the row has 0"),
        ({"prompt": "<image>", "images": [PNG, PNG]}, "1 places for images, and the row has 2"),
        ({"prompt": "What?", "image": "https://example.com/a.png"}, "not read during a run"),
        ({"prompt": "What?", "image": 3}, "an image is 3"),
        ({"prompt": "What?", "image": {}}, "give its bytes, a path or a URL"),
        ({"prompt": "What?", "image": "data:image/png;base64,%%%"}, "no data URL"),
        ({"prompt": user({"type": "video", "video": "a.mp4"})}, "there are text and image"),
        ({"prompt": user(3)}, "a part of a message is 3"),
    ],
)
def test_what_is_wrong_with_a_row(row: dict[str, Any], error: str) -> None:
    with pytest.raises(DataError, match=error):
        with_images(row, "train", 0, BASE)
