"""Random values, documents and bytes to put where something else is expected."""

import datetime
from copy import deepcopy
from random import Random
from typing import Any

import yaml

TEXTS = (
    "", " ", "a", "é", "\x00", "a\nb", "\ud800", "😀", "null", "true", "1", "-1", "1e400", "nan", "0-3", "0%-50%",
    "all", "50%-", "9-1", "99999999999999999999-", "~nobody-here/x", "../..", "/", ".", "*", "[", "{x}", "%s",
    "a.b.c", "data", "a" * 300, "b" * 20_000, "actor", "prompt", "text", "text.x", "own.py:count", "own.py:", ":x",
    ":", "own.py:Judge", "own.py:Judge.score", "own.py:length", "own.py:count.x", "own.py:number", "own.py",
    "json:dumps", "json", "os:path", "nowhere:x", "nowhere.py:x", "..x:y", "a b:c", "broken.py:x", "raises.py:x",
    "exits.py:x", "nul.py:x", "grpo", "distflow.__main__:x", "rows.jsonl", "none.jsonl", "folder",
    "pipe.jsonl", "bad.jsonl", "odd.parquet", "empty.jsonl", "x\x1b[31m", "\u202e", "\u202eabc",
    "'", '"', "#", ":", "- ", "?", "!!int x", "&a", "*a", "<<", "=",
)  # fmt: skip
NUMBERS = (
    0, 1, -1, 2, 3, 7, 64, 2**31, 2**63, 2**64, 10**9, 10**12, 10**30, -(10**30), 10**400, 10**5000, 0.0, -0.0, 0.5,
    1.5, -2.5, 1e-320, 1e308, float("nan"), float("inf"), float("-inf"),
)  # fmt: skip


def junk(rng: Random, depth: int = 3) -> Any:
    """Returns a random value of YAML or JSON."""
    pick = rng.random()
    if depth and pick < 0.12:
        return [junk(rng, depth - 1) for _ in range(rng.randrange(4))]
    if depth and pick < 0.26:
        return {_key(rng): junk(rng, depth - 1) for _ in range(rng.randrange(4))}
    if pick < 0.5:
        return rng.choice(NUMBERS)
    if pick < 0.8:
        return rng.choice(TEXTS)
    return rng.choice((None, True, False, datetime.date(2025, 1, 1), b"\xff\x00", [], {}, [[]], [None], {"a": None}))


def _key(rng: Random) -> Any:
    return rng.choice(TEXTS) if rng.random() < 0.8 else rng.choice((1, None, True, 2.5, datetime.date(2025, 1, 1)))


class _Dumper(yaml.SafeDumper):
    """Also writes integers that Python refuses to convert to decimal."""


_Dumper.add_representer(
    int, lambda d, n: d.represent_scalar("tag:yaml.org,2002:int", f"{n:#x}" if n > 2**64 else str(n))
)


def as_yaml(value: Any, **options: Any) -> str:
    return str(yaml.dump(value, Dumper=_Dumper, sort_keys=False, **options))


def places(doc: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Returns the paths of all values in a document."""
    paths = [path] if path else []
    items = doc.items() if isinstance(doc, dict) else enumerate(doc) if isinstance(doc, list) else ()
    for key, value in items:
        paths += places(value, (*path, key))
    return paths


def mutate(doc: Any, rng: Random) -> None:
    """Changes one thing in a document, in place: a value, a key, or where something is."""
    paths = places(doc)
    if not paths:
        return
    *parents, last = rng.choice(paths)
    parent = _at(doc, tuple(parents))
    match rng.randrange(8):
        case 0:
            del parent[last]
        case 1 if isinstance(parent, dict):
            parent[misspelt(str(last), rng)] = parent.pop(last)
        case 2 if isinstance(parent, dict):
            parent[_key(rng)] = junk(rng)
        case 3:
            parent[last] = [parent[last]]
        case 4:
            parent[last] = deepcopy(_at(doc, rng.choice(paths)))
        case 5 if isinstance(parent[last], str):
            parent[last] = misspelt(parent[last], rng)
        case _:
            parent[last] = junk(rng)


def misspelt(word: str, rng: Random) -> str:
    at = rng.randrange(len(word) + 1)
    return rng.choice((word[:at] + word[at + 1 :], word[:at] + rng.choice(TEXTS) + word[at:], word.upper(), word + "s"))


def _at(doc: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        doc = doc[key]
    return doc


def damaged(data: bytes, rng: Random) -> bytes:
    """Returns a copy with bytes flipped, cut, repeated, inserted or removed."""
    copy = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        at = rng.randrange(len(copy) + 1)
        match rng.randrange(7):
            case 0:
                del copy[at:]
            case 1 if at < len(copy):
                copy[at] ^= 1 << rng.randrange(8)
            case 2:
                del copy[at : at + rng.randrange(1, 20)]
            case 3:
                copy[at:at] = bytes(rng.randrange(256) for _ in range(rng.randrange(1, 9)))
            case 4:
                copy[at:at] = copy[at : at + rng.randrange(1, 200)]
            case 5:
                copy[at:at] = rng.choice((b"\x00", b"\xff", b"\n", b"\r\n", b"\xef\xbb\xbf", b"\xc3", b"\xed\xa0\x80"))
            case _:
                copy[at : at + 8] = b"\xff" * 8
    return bytes(copy)
