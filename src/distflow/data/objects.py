"""Python objects as bytes and back: text as UTF-8, columns of plain numbers as they are in memory, the rest as JSON."""

import json
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from distflow.data.balance import Ints

Kind = Literal["text", "json", "float", "int", "bool"]
KINDS: tuple[Kind, ...] = get_args(Kind)

_NUMBERS: dict[type, Kind] = {float: "float", int: "int", bool: "bool"}
_DTYPES: dict[Kind, np.dtype[Any]] = {"float": np.dtype("f8"), "int": np.dtype("i8"), "bool": np.dtype("?")}
_to_json = json.JSONEncoder(ensure_ascii=False, check_circular=False).encode
_from_json = json.JSONDecoder().decode


def encode(rows: list[Any]) -> tuple[Kind, NDArray[np.uint8], Ints]:
    """How the column is written, its bytes, and how many of them each row has."""
    types = set(map(type, rows))
    if len(types) == 1 and (kind := _NUMBERS.get(next(iter(types)))):
        try:
            values = np.array(rows, _DTYPES[kind])
            return kind, values.view(np.uint8), np.full(len(rows), values.itemsize, np.int64)
        except OverflowError:  # Python's integers have no limit
            pass
    text = types == {str}
    encoded = [(row if text else _to_json(row)).encode("utf-8", "surrogatepass") for row in rows]
    lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
    return "text" if text else "json", np.frombuffer(bytearray(b"".join(encoded)), np.uint8), lengths


def decode(memory: NDArray[np.uint8], places: Ints, lengths: Ints, kinds: Ints) -> list[Any]:
    """The rows at these places; `kinds` says, as an index into KINDS, how each was written."""
    if len(kinds) and (kinds == kinds[0]).all():
        return _decode(memory, places, lengths, KINDS[int(kinds[0])])
    rows: list[Any] = [None] * len(places)
    for k in np.unique(kinds).tolist():  # workers may have written the same column in different ways
        where = np.flatnonzero(kinds == k)
        for i, row in zip(where.tolist(), _decode(memory, places[where], lengths[where], KINDS[k]), strict=True):
            rows[i] = row
    return rows


def _decode(memory: NDArray[np.uint8], places: Ints, lengths: Ints, kind: Kind) -> list[Any]:
    if dtype := _DTYPES.get(kind):
        numbers = memory[places[:, None] + np.arange(dtype.itemsize)].view(dtype)
        return numbers.ravel().tolist()  # type: ignore[no-any-return]
    view = memoryview(memory)  # type: ignore[arg-type]
    pieces = zip(places.tolist(), (places + lengths).tolist(), strict=True)
    texts = [str(view[a:b], "utf-8", "surrogatepass") for a, b in pieces]
    return texts if kind == "text" else [_from_json(t) for t in texts]
