"""Data URLs: bytes, such as an encoded image, as text."""

import base64
import binascii
from urllib.parse import unquote

PREFIX = "data:"


def encode(data: bytes, kind: str = "application/octet-stream") -> str:
    return f"{PREFIX}{kind};base64,{base64.b64encode(data).decode()}"


def decode(url: str) -> bytes:
    """Returns the bytes; raises a ValueError if the text is no data URL."""
    head, comma, text = url.partition(",")
    if not comma or not head.startswith(PREFIX):
        raise ValueError("it does not begin with `data:` and a comma")
    try:
        return base64.b64decode(text, validate=True) if head.endswith(";base64") else unquote(text).encode("latin1")
    except (binascii.Error, ValueError) as e:
        raise ValueError(str(e)) from None
