"""Converts Python objects to bytes and back: text as UTF-8, columns of plain numbers as binary, the rest as JSON."""

import json
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from distflow.util.arrays import Ints

Kind = Literal["text", "json", "float", "int", "bool"]
KINDS: tuple[Kind, ...] = get_args(Kind)

_NUMBERS: dict[type, Kind] = {float: "float", int: "int", bool: "bool"}
_DTYPES: dict[Kind, np.dtype[Any]] = {"float": np.dtype("f8"), "int": np.dtype("i8"), "bool": np.dtype("?")}
_to_json = json.JSONEncoder(ensure_ascii=False, check_circular=False).encode
_from_json = json.JSONDecoder().decode


def encode(values: list[Any]) -> tuple[Kind, NDArray[np.uint8], Ints]:
    """Returns the encoding of the column, its bytes, and the number of bytes of each value."""
    types = set(map(type, values))
    if len(types) == 1 and (kind := _NUMBERS.get(next(iter(types)))):
        try:
            numbers = np.array(values, _DTYPES[kind])
            return kind, numbers.view(np.uint8), np.full(len(values), numbers.itemsize, np.int64)
        except OverflowError:  # Python's integers have no limit
            pass
    text = types == {str}
    encoded = [(v if text else _to_json(v)).encode("utf-8", "surrogatepass") for v in values]
    lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
    return "text" if text else "json", np.frombuffer(bytearray(b"".join(encoded)), np.uint8), lengths


def decode(memory: NDArray[np.uint8], offsets: Ints, lengths: Ints, kinds: Ints) -> list[Any]:
    """Returns the values at these offsets; `kinds` has the encoding of each, as an index into KINDS."""
    if len(kinds) and (kinds == kinds[0]).all():
        return _decode(memory, offsets, lengths, KINDS[int(kinds[0])])
    values: list[Any] = [None] * len(offsets)
    for k in np.unique(kinds).tolist():  # workers may have encoded the same column differently
        index = np.flatnonzero(kinds == k)
        for i, value in zip(index.tolist(), _decode(memory, offsets[index], lengths[index], KINDS[k]), strict=True):
            values[i] = value
    return values


def _decode(memory: NDArray[np.uint8], offsets: Ints, lengths: Ints, kind: Kind) -> list[Any]:
    if dtype := _DTYPES.get(kind):
        numbers = memory[offsets[:, None] + np.arange(dtype.itemsize)].view(dtype)
        return numbers.ravel().tolist()  # type: ignore[no-any-return]
    view = memoryview(memory)  # type: ignore[arg-type]
    ranges = zip(offsets.tolist(), (offsets + lengths).tolist(), strict=True)
    texts = [str(view[a:b], "utf-8", "surrogatepass") for a, b in ranges]
    return texts if kind == "text" else [_from_json(t) for t in texts]
