"""Formats sizes, times and names for display."""

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


def seconds(value: float) -> str:
    """Formats a time: `81.3 s`, `4.2 ms`, `12 µs`."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}" if value < 1000 else f"{value:,.0f} s"
    return f"{value / 1e-6:.2g} µs" if value else "0 s"


def duration(value: float) -> str:
    """Formats a number of seconds roughly: `3 days`, `5 min`, `42 s`."""
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if value >= 2 * size:
            return f"{value / size:.0f} {unit}"
    return f"{max(0.0, value):.0f} s"


def ago(value: float) -> str:
    """Formats how many seconds ago something happened."""
    return f"{duration(value)} ago"


def clean(text: str) -> str:
    """Replaces control characters, which names of columns and rank sets may have, and terminals and XML may not."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def names(items: Iterable[str]) -> str:
    """Joins names for display."""
    return clean(", ".join(items))
