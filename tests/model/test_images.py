"""Images of one worker: read, refused, processed once, and freed."""

import base64
import io
import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from distflow.dataset.dataset import Dataset
from distflow.dataset.view import DatasetView
from distflow.errors import DataError
from distflow.model.images import Images, open_images
from distflow.model.prompt_check import check_prompts
from distflow.model.text import Text
from vision import QUESTION, model, picture, png


@pytest.fixture
def images() -> Images:
    return Images(model("qwen2_5_vl").source.processor, {"train": lambda i: {"images": [png(seed=i)]}})


def write(folder: Path, rows: list[dict[str, object]]) -> Path:
    file = folder / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(rows), file)
    return file


def test_an_image_is_processed_once_until_it_is_freed(images: Images, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    original = Images.read

    def counted(self: Images, reference: str) -> bytes:
        read.append(reference)
        return original(self, reference)

    monkeypatch.setattr(Images, "read", counted)
    for _ in range(3):
        images.processed("row:train:0:0")
        images.processed("row:train:1:0")
    assert read == ["row:train:0:0", "row:train:1:0"]
    images.free([["row:train:0:0"], ["row:train:1:0"]], left=[[["row:train:1:0"]]])
    images.processed("row:train:0:0")
    images.processed("row:train:1:0")
    assert read == ["row:train:0:0", "row:train:1:0", "row:train:0:0"]


def test_broken_missing_and_enormous_images_are_refused(
    images: Images, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken.png").write_bytes(png()[:60])
    (tmp_path / "text.png").write_text("no image")
    (tmp_path / "good.png").write_bytes(png())
    with pytest.raises(DataError, match=r"broken\.png cannot be decoded"):
        images.processed(str(tmp_path / "broken.png"))
    with pytest.raises(DataError, match=r"text\.png cannot be decoded"):
        images.processed(str(tmp_path / "text.png"))
    with pytest.raises(DataError, match=r"none\.png cannot be read: No such file"):
        images.processed(str(tmp_path / "none.png"))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(DataError, match=r"good\.png has more than 100 pixels; scale it down"):
        images.processed(str(tmp_path / "good.png"))


def test_bad_images_are_errors_that_name_the_row_or_are_skipped(tmp_path: Path) -> None:
    tiny = model("qwen2_5_vl")
    rows: list[dict[str, object]] = [
        {"prompt": "<image>a", "images": [{"bytes": png(), "path": None}]},
        {"prompt": "<image>b", "images": [{"bytes": b"broken", "path": None}]},
        {"prompt": "<image><image>c", "images": [{"bytes": png(), "path": None}]},
        {"prompt": "<image>d", "images": [{"bytes": None, "path": "gone.png"}]},
        {"prompt": "<image>" + "e" * 100, "images": [{"bytes": png((32, 32)), "path": None}]},
        {"prompt": "f", "images": []},
    ]
    view = DatasetView(Dataset([write(tmp_path, rows)]), {}, images="train")
    images = open_images(tiny.source, view, None)
    text = Text(tiny.source, 60, images=images)
    with pytest.raises(
        DataError, match=r"rows\.parquet:2: the image 1 of the row cannot be decoded.*fix the row or set"
    ):
        check_prompts(view, text, skip=False)
    checked = check_prompts(view, text, skip=True)
    assert len(checked.rows) == 2
    assert checked.count == 4
    expected = [
        "rows.parquet:2: the image 1",
        "rows.parquet:3: the prompt has 2 places",
        "rows.parquet:4: the image",
        "tokens",
    ]
    assert all(part in line for part, line in zip(expected, checked.skipped, strict=True))
    assert images
    assert images.nbytes == 0, "what the check has read is freed"
    assert checked.rows[1] == {"prompt": "f", "images": []}


def test_rows_of_a_jsonl_file_refer_to_themselves_and_to_files_beside_it(tmp_path: Path) -> None:
    tiny = model("idefics3")
    (tmp_path / "a.png").write_bytes(png(seed=5))
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "What?", "image": "a.png"}) + "\n")
    view = DatasetView(Dataset([tmp_path / "rows.jsonl"]), {"question": "prompt"}, images="train")
    assert view.column_names == ("prompt", "images")
    assert view[0]["images"] == [str(tmp_path / "a.png")]
    images = open_images(tiny.source, view, None)
    assert images
    assert images.read(view[0]["images"][0]) == png(seed=5)


def test_small_copies_are_data_urls_of_bounded_size(tmp_path: Path) -> None:
    images = Images(model("qwen2_5_vl").source.processor, {"train": lambda i: {"images": [png((600, 300))]}})
    (picture,) = images.pictures(["row:train:0:0"])
    head, _, text = picture.partition(",")
    assert head == "data:image/jpeg;base64"
    assert Image.open(io.BytesIO(base64.b64decode(text))).size == (256, 128)


PARTS_ONLY = (
    "{% for m in messages %}{{ m['role'] }}:{% for p in m['content'] %}{% if p['type'] == 'text' %}{{ p['text'] }}"
    "{% elif p['type'] == 'image' %}<image>{% endif %}{% endfor %};{% endfor %}"
)


def test_a_template_that_writes_only_parts_gets_parts() -> None:
    tiny = model("idefics3")
    tokenizer = deepcopy(tiny.source.tokenizer)
    tokenizer.chat_template = PARTS_ONLY
    text = Text(replace(tiny.source, tokenizer=tokenizer), 1000, images=tiny.images)
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Look."}, *QUESTION]
    tokens = text.encode(messages, [picture(0)])
    assert tokenizer.decode(tokens, skip_special_tokens=True) == "system:Look.;user:What?;"
    assert tokens.count(tiny.images.token) == tiny.images.processed(picture(0)).tokens.count(tiny.images.token)
