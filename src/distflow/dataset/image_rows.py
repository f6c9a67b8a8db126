"""Images in the rows of a data set, in the forms that TRL, verl and OpenAI's API have. Imports no torch.

A row comes out with chat messages in `prompt`, in which `{"type": "image"}` stands for an image, and with `images`: a
reference for each. A reference is short text: the path of a file, or the place of the row that holds the image.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from distflow.errors import DataError, shown
from distflow.plan.field_bytes import IMAGES
from distflow.util import data_url

COLUMNS = ("images", "image")
PLACE = "<image>"  # in text, where an image is
_ROW = "row:"  # begins a reference to a row: row:SET:NUMBER:IMAGE
_IMAGE = {"type": "image"}
_KEYS = ("image", "image_url", "url", "path", "bytes")  # of a part, or of a value in a column, that have the image


def with_images(row: Mapping[str, Any], name: str, number: int, base: Path) -> dict[str, Any]:
    """Returns a row of the data set `name` with its images as references; paths are relative to `base`."""
    messages, given = _read(row)
    references = [_reference(value, f"{_ROW}{name}:{number}:{i}", base) for i, value in enumerate(given)]
    rest = {key: value for key, value in row.items() if key not in COLUMNS}
    return rest | ({} if messages is None else {"prompt": messages}) | {IMAGES: references}


def names_with_images(names: Sequence[str]) -> tuple[str, ...]:
    """Returns the columns of rows whose images are references."""
    return (*(name for name in names if name not in COLUMNS), IMAGES)


def may_have_images(rows: Iterable[Mapping[str, Any]], rename: Mapping[str, str]) -> bool:
    """Returns whether rows have a column of images, or messages with parts, of which some may be images."""
    return any(_may_have_images({rename.get(k, k): v for k, v in row.items()}) for row in rows)


def _may_have_images(row: Mapping[str, Any]) -> bool:
    if any(name in row for name in COLUMNS):
        return True
    prompt = row.get("prompt")
    messages = prompt if isinstance(prompt, list) else []
    return any(isinstance(m, Mapping) and isinstance(m.get("content"), list) for m in messages)


def image_of_row(row: Mapping[str, Any], index: int) -> bytes:
    """Returns one of the images that a row holds, encoded, such as PNG or JPEG."""
    content = _content(_read(row)[1][index])
    assert isinstance(content, bytes)
    return content


def row_of(reference: str) -> tuple[str, int, int] | None:
    """Returns data set, number of the row and index of the image of a reference to a row; None for a file."""
    if not reference.startswith(_ROW):
        return None
    name, number, index = reference.removeprefix(_ROW).rsplit(":", 2)
    return name, int(number), int(index)


def _reference(value: Any, place: str, base: Path) -> str:
    content = _content(value)
    return place if isinstance(content, bytes) else str((base / content).absolute())


def _read(row: Mapping[str, Any]) -> tuple[Any, list[Any]]:
    """Returns the prompt as messages, if there is one, and the images in the order of their places."""
    has_column = any(name in row for name in COLUMNS)  # only then <image> in a text is more than text
    columns = [v for name in COLUMNS if (v := row.get(name)) is not None]
    waiting: list[Any] = [image for v in columns for image in (v if isinstance(v, list) else [v])]
    prompt = row.get("prompt")
    if isinstance(prompt, str):
        if not waiting and not (has_column and PLACE in prompt):
            return prompt, []
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not all(isinstance(m, dict) for m in prompt):
        return prompt, waiting
    found: list[Any] = []
    messages = [{**m, "content": list(_parts(m.get("content"), waiting, found, has_column))} for m in prompt]
    places = sum(part == _IMAGE for m in messages for part in m["content"])
    if not places and waiting and messages:  # as TRL does: images without places are before the first user's text
        first = next((m for m in messages if m.get("role") == "user"), messages[0])
        first["content"], found = [*[_IMAGE] * len(waiting), *first["content"]], waiting
        waiting = []
    if waiting or len(found) < places:
        raise DataError(
            f"the prompt has {places} places for images, and the row has {len(found) + len(waiting)} images;"
            f" give one {PLACE} or one part {_IMAGE} per image"
        )
    return [_joined(m) for m in messages], found


def _parts(content: Any, waiting: list[Any], found: list[Any], has_column: bool) -> Iterator[dict[str, Any]]:
    """Yields the parts of a message; images move from `waiting`, or from the part itself, to `found`."""
    if content is None:
        return
    for part in content if isinstance(content, list) else [{"type": "text", "text": content}]:
        if not isinstance(part, dict):
            raise DataError(f"a part of a message is {shown(part, 60)}; write {{'type': 'text', 'text': …}}")
        if part.get("type") in ("image", "image_url"):
            own = next((part[k] for k in _KEYS if part.get(k) is not None), None)
            if own is not None:
                found.append(own)
            elif waiting:
                found.append(waiting.pop(0))
            yield _IMAGE
        elif part.get("type") == "text":
            text = str(part.get("text") or "")
            pieces = text.split(PLACE) if has_column else [text]
            for i, piece in enumerate(pieces):
                if i:
                    if waiting:
                        found.append(waiting.pop(0))
                    yield _IMAGE
                if piece:
                    yield {"type": "text", "text": piece}
        else:
            raise DataError(f"a part of a message has the type {shown(part.get('type'), 40)}; there are text and image")


def _joined(message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message without images with plain text, which every chat template reads."""
    parts = message["content"]
    if any(part == _IMAGE for part in parts):
        return message
    return {**message, "content": "".join(part["text"] for part in parts)}


def _content(value: Any) -> bytes | str:
    """Returns the encoded image, or the path of its file."""
    if isinstance(value, Mapping):
        given = next((value[k] for k in ("bytes", *_KEYS) if value.get(k) is not None), None)
        if given is None:
            raise DataError(f"an image is {shown(dict(value), 60)}; give its bytes, a path or a URL")
        return _content(given)
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str) or not value:
        raise DataError(f"an image is {shown(value, 60)}; give its bytes, a path or a URL")
    if value.startswith(data_url.PREFIX):
        try:
            return data_url.decode(value)
        except ValueError as e:
            raise DataError(f"an image is {shown(value, 60)}, which is no data URL ({e})") from None
    if value.startswith("file:"):
        return unquote(urlsplit(value).path)
    if "://" in value[:12]:
        raise DataError(
            f"an image is at {shown(value, 100)}, which is not read during a run; download it, give its path"
        )
    return value
