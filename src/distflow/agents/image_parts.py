"""Images in messages, whichever way they are written: of TRL and verl, of OpenAI's and of Anthropic's APIs.

Between an environment and its worker, an image is `{"type": "image", "image": REFERENCE}`: one of the references of the
sample's row, or a data URL.
"""

import io
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from distflow.errors import shown
from distflow.util import data_url

IMAGE = "image"
_TYPES = ("image", "image_url", "input_image")
_KEYS = ("image", "image_url", "source", "url", "path", "bytes", "data")  # that hold the image, or another mapping


def value_of(part: Any) -> Any:
    """Returns what holds the image of a part of a message; None for other parts, and for an image without one."""
    while isinstance(part, Mapping):
        if part.get("type") == "base64" and isinstance(part.get("data"), str):  # Anthropic's
            return f"{data_url.PREFIX}{part.get('media_type', 'image/png')};base64,{part['data']}"
        part = next((part[key] for key in _KEYS if part.get(key) is not None), None)
    return part


def is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in _TYPES


def image_part(reference: str) -> dict[str, Any]:
    return {"type": IMAGE, IMAGE: reference}


def references_of(messages: Iterable[Mapping[str, Any]]) -> list[str]:
    """Returns the references to the images of messages, in their order."""
    return [part[IMAGE] for m in messages if isinstance(m["content"], list) for part in m["content"] if is_image(part)]


def without_references(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a message as templates and people read it: an image is only its place."""
    if not isinstance(message.get("content"), list):
        return dict(message)
    return {**message, "content": [{"type": IMAGE} if is_image(part) else part for part in message["content"]]}


def with_references(prompt: Any, references: Sequence[str]) -> Any:
    """Returns the prompt of a row with the references to its images at their places."""
    if not references:
        return prompt
    rest = iter(references)
    return [
        {**m, "content": [image_part(next(rest)) if is_image(part) else part for part in m["content"]]}
        if isinstance(m.get("content"), list)
        else m
        for m in prompt
    ]


def as_text(messages: Sequence[Mapping[str, Any]], known: Collection[str]) -> list[dict[str, Any]]:
    """Returns messages whose images are references: `known` ones, or else data URLs of their content.

    Raises a ValueError that completes a sentence whose subject is the environment.
    """
    return [
        {**m, "content": [image_part(_reference(part, known)) if is_image(part) else part for part in m["content"]]}
        if isinstance(m.get("content"), list)
        else dict(m)
        for m in messages
    ]


def _reference(part: Mapping[str, Any], known: Collection[str]) -> str:
    value = value_of(part)
    if isinstance(value, str) and (value in known or value.startswith(data_url.PREFIX)):
        return value
    if isinstance(value, bytes | bytearray):
        return data_url.encode(bytes(value), "image/png")
    if callable(getattr(value, "save", None)):  # Pillow's
        out = io.BytesIO()
        value.save(out, "PNG")
        return data_url.encode(out.getvalue(), "image/png")
    if isinstance(value, Path) or (isinstance(value, str) and value and "://" not in value.removeprefix("file://")):
        path = unquote(urlsplit(value).path) if isinstance(value, str) and value.startswith("file:") else value
        try:
            return data_url.encode(Path(path).read_bytes(), "image/png")
        except (OSError, ValueError) as e:
            raise ValueError(f"gave the image {shown(str(value), 100)}, which cannot be read: {e}") from None
    raise ValueError(
        f"gave {shown(value, 60)} as an image; give a Pillow image, the bytes of a PNG or JPEG, a path or a data URL"
    )
