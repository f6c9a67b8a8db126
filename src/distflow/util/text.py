"""Formats sizes and names for display."""

import re
from collections.abc import Iterable

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_CONTROL = re.compile(r"[^\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def human_bytes(n: float) -> str:
    """Formats a number of bytes: `512 B`, `1.5 KiB`, `32.1 MiB`."""
    power = 0
    while n >= 1023.5 and power < len(_UNITS) - 1:  # 1023.6 KiB would be written 1024 KiB
        n, power = n / 1024, power + 1
    return f"{n:.0f} {_UNITS[power]}" if power == 0 or n >= 99.95 else f"{n:.1f} {_UNITS[power]}"


def clean(text: str) -> str:
    """Replaces control characters, which names of columns and rank sets may have, and terminals and XML may not."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def names(items: Iterable[str]) -> str:
    """Joins names for display."""
    return clean(", ".join(items))
