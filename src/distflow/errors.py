"""Errors a user can mend: each message names the thing, the place and the way out."""

from collections.abc import Iterable
from difflib import get_close_matches


class DistflowError(Exception):
    """Base of every error whose message is meant for the user as it stands, without a traceback."""


class ConfigError(DistflowError):
    """A configuration file or an override says something that cannot be."""


class FlowError(DistflowError):
    """The graph is wrong: a node or a field does not fit."""


class PlacementError(DistflowError):
    """A group or a layout does not fit the workers."""


class DataError(DistflowError):
    """A data file, a row, or a column that a node wrote is wrong."""


class NodeError(DistflowError):
    """A node's function failed: carries step, node and rank."""


class PeerLostError(DistflowError):
    """A collective broke because another worker went away; the cause is in that worker."""


class StuckError(DistflowError):
    """A worker waited too long; the message is the table of who waits for whom."""


class CheckpointError(DistflowError):
    """A checkpoint cannot be written or read."""


class StoppedError(DistflowError):
    """The run was told to end, and has kept what it did."""


def cut(text: str, most: int = 80) -> str:
    """On one line, and not longer than that."""
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[: most - 1]}…"


def shown(value: object, most: int = 80) -> str:
    """A value as Python writes it, for a message."""
    try:
        return cut(repr(value), most)
    except Exception:  # a class may have a `repr` that fails, and a number more digits than Python likes to write
        return f"a {type(value).__name__}"


def suggest(word: object, options: Iterable[object]) -> str:
    """`; did you mean 'x'?` for the nearest option, or the list of options when nothing is near."""
    known = sorted({cut(str(o)) for o in options})
    near = get_close_matches(cut(str(word)), known, n=1, cutoff=0.6)
    if near:
        return f"; did you mean '{near[0]}'?"
    if not known:
        return "; there are none"
    shown = ", ".join(known[:12]) + (", …" if len(known) > 12 else "")
    return f"; known: {shown}"
