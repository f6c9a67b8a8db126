"""Errors that a user can fix: each message names the thing, the place and the way out."""

import importlib
import traceback
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from pathlib import Path
from unicodedata import category

PACKAGE = str(Path(__file__).parent)  # where our own code is
_NO_PLACE = (PACKAGE, "<frozen", str(Path(importlib.__file__).parent))  # files that say nothing to a user


class DistflowError(Exception):
    """Base of all errors whose message is shown to the user as it is, without a traceback."""


class ConfigError(DistflowError):
    """A config file, an override or an option is wrong: `key: problem; way out`."""

    @property
    def problem(self) -> str:
        return str(self).partition(": ")[2].partition(";")[0]


class FlowError(DistflowError):
    """The flow is wrong: a node or a field does not fit."""


class PlacementError(DistflowError):
    """A rank set or a layout does not fit the workers."""


class DataError(DistflowError):
    """A data file, a row, or a field that a node wrote is wrong."""


class NodeError(DistflowError):
    """A node's function failed; the message has rank, step and node."""


class PeerLostError(DistflowError):
    """A collective failed because another worker is gone; the cause is in that worker."""


class StuckError(DistflowError):
    """A worker waited too long; the message has the table of who waits for whom."""


class CheckpointError(DistflowError):
    """A checkpoint cannot be written or read."""


class WeightsError(DistflowError):
    """A rollout engine does not have the weights that it should generate with."""


class StoppedError(DistflowError):
    """The run was asked to end, and has saved its state."""


def cut(text: str, length: int = 80) -> str:
    """Returns the text on one line, cut to a length."""
    text = " ".join(text.split())
    return text if len(text) <= length else f"{text[: length - 1]}…"


def printable(text: str) -> str:
    """Returns the text with control characters escaped: a name of a file may hold some that a terminal obeys."""
    if text.isprintable():
        return text
    escape = (c in "\n\t" or not category(c).startswith("C") for c in text)
    return "".join(c if kept else c.encode("unicode_escape").decode() for c, kept in zip(text, escape, strict=True))


def shown(value: object, length: int = 80) -> str:
    """Returns the `repr` of a value, cut to a length."""
    try:
        return cut(repr(value), length)
    except Exception:  # a class may have a `repr` that fails, and an integer more digits than Python converts
        return f"a {type(value).__name__}"


def describe_error(error: BaseException, is_own: Callable[[str], bool] = lambda file: True) -> str:
    """Returns type, message and place of an error in users' code, on one line.

    The place is the last line in a file that `is_own`, even if a library raised the error; else the last of all, but
    for those of this package.
    """
    name = type(error).__name__
    if isinstance(error, SyntaxError):
        return f"{name}: {error.msg} ({error.filename or '?'}:{error.lineno})"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_NO_PLACE)]
    own = [f for f in frames if is_own(f.filename)] or frames
    place = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
    try:
        message = cut(str(error), 300)
    except Exception:  # `__str__` of a user's exception may raise
        message = ""
    return f"{name}{': ' * bool(message)}{message}{place}"


def short_reason(error: BaseException) -> str:
    """Returns the reason of the system's or a library's error: its first line, without type and place."""
    text = (error.strerror if isinstance(error, OSError) else "") or str(error).strip() or type(error).__name__
    return text.splitlines()[0].rstrip(".;: ")


# Keys and arguments that have another name now.
RENAMED = {"hand_over": "generates", "refill": "dynamic_sampling"}


def suggest(word: object, options: Iterable[object]) -> str:
    """Returns `; did you mean 'x'?` with the most similar option, or a list of the options if none is similar."""
    if (new := RENAMED.get(str(word))) is not None:
        return f"; it is called '{new}' now"
    known = sorted({cut(str(o)) for o in options})
    same = [o for o in known if o.lower() == cut(str(word)).lower()]  # but for its case
    similar = same or get_close_matches(cut(str(word)), known, n=1, cutoff=0.6)
    if similar:
        return f"; did you mean '{similar[0]}'?"
    if not known:
        return "; there are none"
    return f"; known: {', '.join(known[:12])}{', …' if len(known) > 12 else ''}"
