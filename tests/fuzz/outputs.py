"""Outputs of nodes: any junk of Python, NumPy and torch. Whatever is accepted must also arrive unchanged."""

import datetime
import enum
from collections import UserDict, UserList
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch

from distflow.batch.batch import Batch, Column, Ragged
from distflow.comm import wire
from distflow.coordinator.buffer import Key
from distflow.coordinator.coordinator import Coordinator
from distflow.dataset.loader import Loader
from distflow.errors import shown
from distflow.flow import Flow, Node
from distflow.plan import Placement, RunNode, Workload, plan
from fuzz.harness import Case
from fuzz.junk import junk

SAMPLES = 4


class Evil:
    def __repr__(self) -> str:
        raise RuntimeError("no")

    def __len__(self) -> int:
        return -1


class OddList(list[Any]):
    def __len__(self) -> int:
        return SAMPLES


class Color(enum.IntEnum):
    RED = 1


def _cycle() -> list[Any]:
    values: list[Any] = [1, 2, 3]
    values.append(values)
    return values


def _deep(n: int) -> Any:
    nested: Any = []
    for _ in range(n):
        nested = [nested]
    return nested


ONE: tuple[Callable[[Random], Any], ...] = (
    lambda r: junk(r),
    lambda r: r.choice((1, 1.5, True, None, "x", "\ud800", 10**30, 10**5000, float("nan"), "", "é" * 100)),
    lambda r: r.choice((_cycle(), _deep(200), _deep(5000), Evil(), object(), Color.RED, Decimal(1), 1j, ..., print)),
    lambda r: np.array(r.choice((1, 1.5, "x", None, b"x", True)), dtype=None),
    lambda r: r.choice((np.float64(1), np.int8(1), np.str_("x"), np.datetime64("2025-01-01"), np.longdouble(1))),
    lambda r: r.choice((np.void(b"ab"), np.bool_(True), np.complex64(1), np.array([[]]), np.array(["a", "b"]))),
    lambda r: torch.zeros(r.choice(((), (0,), (2,), (3,), (2, 2), (1, 1, 1, 1, 1, 1, 1, 1)))),
    lambda r: torch.zeros(2, dtype=r.choice((torch.int8, torch.bool, torch.bfloat16, torch.complex64, torch.uint16))),
    lambda r: {r.choice(("a", 1, None, ("x",))): 1},
    lambda r: r.choice(
        ((1, 2), {1, 2}, frozenset("a"), range(3), b"x", bytearray(b"x"), datetime.datetime(2025, 1, 1))
    ),
    lambda r: r.choice((UserList([1]), UserDict({"a": 1}), iter([1]), (x for x in (1, 2)), Path("x"), type)),
)


def _tensor(r: Random) -> Any:
    tensor: Any = torch.arange(24.0).reshape(4, 6)
    match r.randrange(16):
        case 0:
            return tensor.to_sparse()
        case 1:
            return torch.zeros(4, device="meta")
        case 2:
            return torch.conj(torch.ones(4, 2, dtype=torch.complex64) * 1j)
        case 3:
            return torch.quantize_per_tensor(tensor, 0.1, 0, torch.quint8)
        case 4:
            return torch.nested.nested_tensor([torch.zeros(i) for i in range(4)])
        case 5:
            return tensor.T[:4]
        case 6:
            return torch.zeros(1).expand(4)
        case 7:
            return torch.nn.Parameter(tensor)
        case 8:
            return torch.zeros(4, 1, 1, 1, 1, 1, 1)
        case 9:
            return torch.zeros(4, 0, 3)
        case 10:
            return tensor[:, :3].to(torch.float8_e4m3fn)
        case 11:
            return torch._neg_view(tensor)
        case 12:
            return torch.zeros(4, 3).to_sparse_csr()
        case 13:
            return torch.zeros(4, 2).to_mkldnn()
        case 14:
            return torch.zeros(r.randrange(7), 2)
    return torch.zeros(4, dtype=r.choice((torch.float64, torch.int16, torch.uint64, torch.uint8)))


def _array(r: Random) -> Any:
    return r.choice(
        (
            np.array(["a", "b", "c", "d"]), np.array([b"a"] * 4), np.array(["2025-01-01"] * 4, "M8[D]"),
            np.zeros(4, ">f4"), np.zeros((4, 2), [("a", "i4"), ("b", "f4")]),
            np.zeros(8)[::-2], np.zeros(4, np.longdouble), np.zeros(4, "f2"), np.array([1, "x", None, {}], object),
            np.array([[1], [2], [3]], object), np.array(3), np.array("x"),
            np.ma.masked_array([1.0] * 4, [True] * 4), np.zeros((4, 3), order="F"), np.zeros(0),
            np.broadcast_to(np.zeros(1), (4,)), np.zeros(4, np.uint32), np.zeros(4, bool), np.zeros(4, complex),
            np.frombuffer(b"abcd", np.uint8), np.matrix([[1.0]] * 4), np.zeros(4, "m8[s]"),
        )
    )  # fmt: skip


def _ragged(r: Random) -> Any:
    values: Any = r.choice((torch.arange(10.0), torch.arange(10), torch.zeros(2, 5), [1, 2], None))
    starts: Any = np.array(
        r.choice(([0, 2, 4, 6], [6, 4, 2, 0], [0, 0, 0, 0], [-1, 2, 4, 6], [0, 2, 4, 9], [0, 1], []))
    )
    lengths: Any = np.array(r.choice(([2, 2, 2, 2], [0, 0, 0, 0], [1, 1, 1, -1], [2, 2, 2, 200], [2, 2], [])))
    if r.random() < 0.2:
        starts, lengths = r.choice(
            ((starts.tolist(), lengths), (starts, lengths.tolist()), (starts * 0.5, lengths), (None, 4))
        )
    return Ragged(values, starts, lengths, r.choice(((), (), (1,), (2,), (0,), (-1,), (3, 3))))


class Outputs:
    name, quick, full = "outputs", 600, 6000

    def __init__(self, folder: Path) -> None:
        nodes = (Node("write", reads=("text",), writes=("a", "b")), Node("read", reads=("a", "b"), writes=()))
        self.plan = plan(Flow("junk", ("text",), nodes), Placement(1), Workload(SAMPLES))
        self.task = next(t for t in self.plan.tasks if isinstance(t, RunNode))
        self.loader = Loader(_Rows(), SAMPLES, 1, 0)

    def close(self) -> None:
        pass

    def case(self, rng: Random, number: int) -> Case:
        value = self._returned(rng)

        def run() -> None:
            data = Coordinator(0, self.plan, self.loader)
            try:
                data.outputs(1, self.task, value)
                _send({f: data.buffer.get(Key(1, self.task.partition.id, f)) for f in ("a", "b")})
            finally:
                data.close()

        return Case(shown(value, 300), run, ("field '", "returned a "))

    def _returned(self, rng: Random) -> Any:
        pick = rng.random()
        if pick < 0.06:
            return rng.choice(ONE)(rng)
        good = [float(i) for i in range(SAMPLES)]
        fields: dict[Any, Any] = {"a": self._column(rng), "b": good}
        if pick < 0.1:
            fields[rng.choice(("c", "A", 3, None, ("a",), "x" * 5000))] = good
        if pick < 0.14:
            del fields[rng.choice(list(fields))]
        if pick < 0.2:
            return Batch(np.arange(SAMPLES), np.arange(SAMPLES), fields)
        return fields

    def _column(self, rng: Random) -> Any:
        match rng.randrange(6):
            case 0:
                return _tensor(rng)
            case 1:
                return _array(rng)
            case 2:
                return _ragged(rng)
            case 3:
                same = rng.choice(ONE)(rng)
                return rng.choice((list, tuple, OddList))([same] * rng.choice((SAMPLES, SAMPLES, 0, 1, 5)))
            case 4:
                return rng.choice(ONE)(rng)
        return [rng.choice(ONE)(rng) for _ in range(SAMPLES)]


class _Rows:
    column_names: tuple[str, ...] = ("text",)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"text": "x"}


def _send(columns: dict[str, Column]) -> None:
    """Packs and unpacks the columns, as an exchange does, and compares."""
    flat = [wire.flatten(c, f"field '{f}'") for f, c in columns.items()]
    index = np.arange(SAMPLES)
    payload = sum(int(c.lengths[index].sum()) * c.item_bytes for c in flat)
    size = wire.segment_size(len(flat), SAMPLES, payload)
    segments = wire.Segments(np.array([SAMPLES]), np.array([0]))
    memory = torch.zeros(size, dtype=torch.uint8)
    wire.pack(flat, index, segments, memory)
    arrived = wire.unpack(memory, segments, list(columns), index, "a move")
    for f, column in columns.items():
        for i in range(SAMPLES):
            assert _same(arrived[f][i], column[i]), f"field '{f}' arrives as {arrived[f][i]!r}, was {column[i]!r}"


def _same(a: Any, b: Any) -> bool:
    if isinstance(b, torch.Tensor):
        wide = torch.complex128 if b.is_complex() else torch.float64
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.to(wide), b.to(wide))
    if isinstance(b, list) and type(a) is list:
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(b, dict) and type(a) is dict:
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in b)
    return type(a) is type(b) and (a == b or (a != a and b != b))
