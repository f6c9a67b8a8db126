"""Maps parts of a role's tensors to the files of a checkpoint: a pure function of the layout and the tensors.

Each rank writes the parts that it owns into one file, which is named by its place in the layout. The index says how the
tensors were cut, from which a rank of any other layout computes the files that it reads; it does not list the parts.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch

from distflow.errors import CheckpointError
from distflow.weights.shards import Box, overlap, part_of
from distflow.weights.state import RoleState

# Of the replicas of a shard (hybrid sharding), the first few share the writing. All of them would write faster, but
# each reader would open as many files.
_WRITERS = 8
_MOST_RANKS, _LARGEST = 1 << 20, 1 << 48  # bounds, so that a damaged index cannot keep a reader busy
_DTYPES = {
    str(t).removeprefix("torch."): t
    for t in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64),
    )
}


def file_name(place: int) -> str:
    return f"{place:05}.safetensors"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a checkpoint. If it is not `cut`, the first file has all of it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    cut: bool = False
    tp_dim: int | None = None

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Piece:
    """`inner`, a part of a tensor that a reader lacks; the file of `place` has it within its `part`."""

    place: int
    part: Box
    inner: Box


@dataclass(frozen=True)
class TensorIndex:
    """The tensors of a role, and the layout they were cut for; see `engine.weights.Shards`."""

    tensors: Mapping[str, StoredTensor]
    dp: int = 1
    tp: int = 1
    shard: int = 1

    @classmethod
    def of(cls, state: RoleState) -> "TensorIndex":
        tensors = {}
        for name, tensor in state.tensors.items():
            spec = state.specs.get(name)
            if tensor.dtype not in _DTYPES.values():
                raise CheckpointError(f"the tensor '{name}' is {tensor.dtype}, which cannot be saved; convert it")
            if spec is None or not spec.shape:
                tensors[name] = StoredTensor(tuple(tensor.shape), tensor.dtype)
            else:
                tensors[name] = StoredTensor(spec.shape, tensor.dtype, True, spec.tp_dim)
        if state.shards is None:
            return cls(tensors)
        layout = state.shards.layout
        return cls(tensors, layout.dp, layout.tp, state.shards.shard)

    def owned(self, place: int) -> dict[str, Box]:
        """Returns the tensors that the file of this place has, with the part of each."""
        parts: dict[str, Box] = {}
        d, t = divmod(place, self.tp)
        s = d % self.shard
        for name, tensor in self.tensors.items():
            if tensor.cut:
                part = self._part(tensor, s, t)
                if self._owner(name, s, t) == place and all(lo < hi for lo, hi in part):
                    parts[name] = part
            elif place == 0:
                parts[name] = _whole(tensor)
        return parts

    def pieces(self, name: str, wanted: Box) -> Iterator[Piece]:
        """Yields where a part of a tensor is. Computes the range of files rather than trying all."""
        tensor = self.tensors[name]
        if overlap(_whole(tensor), wanted) is None:
            return
        if not tensor.cut:
            yield Piece(0, _whole(tensor), wanted)
            return
        for t in self._columns(tensor, wanted):
            (first, end), chunk = self._rows(tensor, t)
            lo, hi = max(wanted[0][0], first) - first, min(wanted[0][1], end) - first
            for s in range(lo // chunk, -(-hi // chunk)):
                part = self._part(tensor, s, t)
                inner = overlap(part, wanted)
                assert inner is not None
                yield Piece(self._owner(name, s, t), part, inner)

    def _columns(self, tensor: StoredTensor, wanted: Box) -> range:
        """Returns the tensor-parallel ranks that overlap a part; one of them, if all have the same."""
        if tensor.tp_dim is None:
            return range(1)
        lo, hi = wanted[tensor.tp_dim]
        size = tensor.shape[tensor.tp_dim] // self.tp
        return range(lo // size, -(-hi // size))

    def _rows(self, tensor: StoredTensor, t: int) -> tuple[tuple[int, int], int]:
        """Returns which rows tensor parallelism leaves to rank t, and into how many at a time FSDP cuts them."""
        first, end = 0, tensor.shape[0]
        if tensor.tp_dim == 0:
            first, end = t * (end // self.tp), (t + 1) * (end // self.tp)
        return (first, end), -(-(end - first) // self.shard)

    def _part(self, tensor: StoredTensor, s: int, t: int) -> Box:
        return part_of(tensor.shape, tensor.tp_dim, t, self.tp, s, self.shard)

    def _owner(self, name: str, s: int, t: int) -> int:
        """Returns the place of the rank that writes a part. Ranks of a replica share what all of them have."""
        t = s % self.tp if self.tensors[name].tp_dim is None else t
        return (self._replica[name] * self.shard + s) * self.tp + t

    @cached_property
    def _replica(self) -> dict[str, int]:
        """Returns the replica that writes a tensor: consecutive tensors of about as many bytes for each."""
        writers = min(self.dp // self.shard, _WRITERS)
        total, before, replicas = sum(t.bytes for t in self.tensors.values()), 0, {}
        for name, tensor in self.tensors.items():
            replicas[name] = before * writers // total if tensor.bytes else 0
            before += tensor.bytes
        return replicas

    def to_json(self) -> str:
        tensors = {
            name: {"shape": t.shape, "dtype": str(t.dtype).removeprefix("torch."), "cut": t.cut, "tp_dim": t.tp_dim}
            for name, t in self.tensors.items()
        }
        return json.dumps({"dp": self.dp, "tp": self.tp, "shard": self.shard, "tensors": tensors})

    @classmethod
    def from_json(cls, text: str) -> "TensorIndex":
        """Parses an index; raises ValueError if it is not one, whatever it is."""
        index = json.loads(text)
        try:
            dp, tp, shard = (_number(index[key], 1, _MOST_RANKS) for key in ("dp", "tp", "shard"))
            tensors = {name: _stored(tensor, tp) for name, tensor in index["tensors"].items()}
        except (LookupError, TypeError, AttributeError) as e:
            raise ValueError(f"the index of the tensors is damaged ({type(e).__name__}: {e})") from None
        if dp % shard or dp * tp > _MOST_RANKS:
            raise ValueError(f"the index of the tensors says dp {dp}, tp {tp}, shard {shard}")
        return cls(tensors, dp, tp, shard)


def _whole(tensor: StoredTensor) -> Box:
    return tuple((0, n) for n in tensor.shape)


def _stored(tensor: Mapping[str, Any], tp: int) -> StoredTensor:
    shape = tuple(_number(n, 0, _LARGEST) for n in tensor["shape"])
    dim, cut, dtype = tensor["tp_dim"], tensor["cut"], _DTYPES[tensor["dtype"]]
    if not isinstance(cut, bool) or (cut and not shape) or prod(shape) > _LARGEST:
        raise ValueError(f"the index of the tensors says {shape}, cut: {cut}")
    if dim is not None and (not cut or shape[_number(dim, 0, len(shape) - 1)] % tp):
        raise ValueError(f"the index of the tensors says that tp {tp} cuts {shape} along {dim}")
    return StoredTensor(shape, dtype, cut, dim)


def _number(value: Any, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"the index of the tensors says {str(value)[:40]} for a number between {least} and {most}")
    return value
