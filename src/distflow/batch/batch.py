"""A batch: columns over samples, ragged or with one value per sample, of tensors or Python objects. No padding."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distflow.batch.copy_ranges import copy_ranges
from distflow.errors import DataError, suggest
from distflow.util.arrays import Ints


@dataclass(frozen=True)
class Ragged:
    """One tensor per sample, of any length: sample i is `values[starts[i] : …]`, shaped [lengths[i], *item_shape].

    `values` is flat and may have gaps between samples, so selecting and reordering samples copies nothing.
    """

    values: Tensor  # [elements]
    starts: Ints  # [samples], in elements
    lengths: Ints  # [samples], in items
    item_shape: tuple[int, ...] = ()

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> "Ragged":
        """Concatenates tensors [length_i, *item_shape] that agree in dtype and item shape."""
        item_shape = tuple(tensors[0].shape[1:])
        lengths = np.array([len(t) for t in tensors], np.int64)
        return cls.packed(torch.cat([t.reshape(-1) for t in tensors]), lengths, item_shape)

    @classmethod
    def packed(cls, values: Tensor, lengths: Ints, item_shape: tuple[int, ...] = ()) -> "Ragged":
        """Wraps values in which the samples follow each other without gaps."""
        counts = lengths * prod(item_shape)
        return cls(values.reshape(-1), np.cumsum(counts) - counts, lengths, item_shape)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> Tensor:
        start, count = int(self.starts[i]), int(self.lengths[i]) * prod(self.item_shape)
        return self.values[start : start + count].view(int(self.lengths[i]), *self.item_shape)

    def __iter__(self) -> Iterator[Tensor]:
        return (self[i] for i in range(len(self)))

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def nbytes(self) -> int:
        """Returns the bytes of the samples, without the gaps between them."""
        return int(self.lengths.sum()) * prod(self.item_shape) * self.values.element_size()

    def select(self, index: Ints) -> "Ragged":
        return Ragged(self.values, self.starts[index], self.lengths[index], self.item_shape)

    def joined(self) -> Tensor:
        """Returns all samples concatenated, [sum of lengths, *item_shape]: a view if they have no gaps between them."""
        counts = self.lengths * prod(self.item_shape)
        ends = np.cumsum(counts)
        total = int(counts.sum())
        first = int(self.starts[0]) if len(self) else 0
        if (self.starts == first + ends - counts).all():
            return self.values[first : first + total].view(int(self.lengths.sum()), *self.item_shape)
        width = self.values.element_size()
        out = torch.empty(total * width, dtype=torch.uint8, device=self.values.device)
        starts, offsets, sizes = (x[None] * width for x in (self.starts, ends - counts, counts))
        copy_ranges([self.values], starts, out, offsets, sizes)
        return out.view(self.dtype).view(int(self.lengths.sum()), *self.item_shape)

    def padded(self, fill: float = 0) -> Tensor:
        """Returns [samples, longest, *item_shape], for a model's forward pass."""
        longest = int(self.lengths.max(initial=0))
        out = self.values.new_full((len(self), longest, *self.item_shape), fill)
        for i, sample in enumerate(self):
            out[i, : len(sample)] = sample
        return out


Column = Tensor | Ragged | list[Any]

# A column on a worker without samples, which does not know the type that it has elsewhere.
NO_SAMPLES = Ragged(torch.empty(0), np.empty(0, np.int64), np.empty(0, np.int64))


class Batch:
    """Samples of a step with some of their fields: the input of a node. `batch["response"]` is a column."""

    def __init__(self, ids: Ints, groups: Ints, columns: Mapping[str, Column]) -> None:
        self.ids, self.groups, self.columns = ids, groups, dict(columns)

    def __len__(self) -> int:
        return len(self.ids)

    def __contains__(self, field: str) -> bool:
        return field in self.columns

    def __getitem__(self, field: str) -> Any:
        """Returns a Column; typed Any, as its reader knows which kind of column it is."""
        if field not in self.columns:
            raise DataError(
                f"the batch has no field '{field}'{suggest(field, self.columns)}; a node gets only the fields it reads"
            )
        return self.columns[field]

    def select(self, index: Ints) -> "Batch":
        return Batch(self.ids[index], self.groups[index], {f: select(c, index) for f, c in self.columns.items()})


def select(column: Column, index: Ints) -> Column:
    """Returns the column of the samples at `index`, in that order."""
    if isinstance(column, Ragged):
        return column.select(index)
    if isinstance(column, Tensor):
        return column[torch.from_numpy(index)]
    return [column[i] for i in index]


def concat(columns: Sequence[Column]) -> Column:
    """Concatenates columns of the same kind, always into new memory; empty columns may be of any kind."""
    columns = [c for c in columns if len(c)] or columns[:1]
    first = columns[0]
    if isinstance(first, Ragged):
        ragged = [c for c in columns if isinstance(c, Ragged)]
        values = torch.cat([c.joined().reshape(-1) for c in ragged])
        return Ragged.packed(values, np.concatenate([c.lengths for c in ragged]), first.item_shape)
    if isinstance(first, Tensor):
        return torch.cat([c for c in columns if isinstance(c, Tensor)])
    return [value for c in columns for value in c]


def nbytes(column: Column) -> int:
    """Returns the bytes of a column; of Python objects only text counts."""
    if isinstance(column, Tensor | Ragged):
        return column.nbytes
    return sum(len(v) for v in column if type(v) is str)


def as_column(value: Any, samples: int, where: str) -> Column:
    """Converts the output of a node into a column of `samples` values; `where` names node and field in errors."""
    if isinstance(value, np.ndarray | Tensor) and value.ndim == 0:
        raise DataError(f"{where}: is a single number; write one value per sample ({samples})")
    if isinstance(value, np.ndarray):
        value = value.tolist() if value.dtype.kind in "OU" else _from_numpy(value, where)
    if isinstance(value, list | tuple):
        value = list(value)
    if not isinstance(value, Tensor | Ragged | list):
        raise DataError(
            f"{where}: is a {type(value).__name__}; write a tensor, a Ragged or a list with one value per sample"
        )
    if isinstance(value, Tensor):
        value = _materialized(value, where)
    if isinstance(value, Ragged):
        value = _checked_ragged(value, where)
    if len(value) != samples:
        raise DataError(f"{where}: has {len(value)} values for {samples} samples; write one value per sample, in order")
    if isinstance(value, Tensor | Ragged):
        return value
    values: list[Any] = value
    types = set(map(type, values))
    if types <= _SCALARS:
        return values
    if any(issubclass(t, Tensor | np.ndarray) for t in types):
        return _from_tensors([_from_numpy(v, where) if isinstance(v, np.ndarray) else v for v in values], where)
    return [_checked_object(v.item() if isinstance(v, np.generic) else v, where, i) for i, v in enumerate(values)]


def floats_as_tensor(column: Column) -> Column:
    """Returns a list of numbers as a tensor, as `torch.tensor` does, if any of them is a float."""
    if isinstance(column, list) and set(map(type, column)) in ({float}, {float, int}):
        return torch.tensor(column, dtype=torch.get_default_dtype())
    return column


def _from_numpy(array: Any, where: str) -> Tensor:
    try:
        return torch.from_numpy(np.require(array, array.dtype.newbyteorder("="), ["C", "W"]))
    except TypeError:
        raise DataError(f"{where}: has the NumPy dtype {array.dtype}; write numbers, booleans or text") from None


def _materialized(tensor: Tensor, where: str) -> Tensor:
    """Returns the tensor with contiguous values in host memory, whichever device the node computed it on."""
    if tensor.is_nested or tensor.is_meta or tensor.is_quantized or tensor.layout != torch.strided:
        raise DataError(
            f"{where}: is a tensor without plain values in memory; convert it, for example with .to_dense()"
        )
    return tensor.detach().resolve_conj().resolve_neg().contiguous().cpu()


def _checked_ragged(ragged: Ragged, where: str) -> Ragged:
    """Checks that every sample lies within the values."""
    values, starts, lengths, item_shape = ragged.values, ragged.starts, ragged.lengths, ragged.item_shape
    counts = [x for x in (starts, lengths) if isinstance(x, np.ndarray) and x.dtype.kind in "iu" and x.ndim == 1]
    fits = len(counts) == 2 and len(starts) == len(lengths) and isinstance(values, Tensor) and values.ndim == 1
    fits = fits and all(d >= 0 for d in item_shape) and bool((starts >= 0).all() and (lengths >= 0).all())
    if not fits or not (starts + lengths * prod(item_shape) <= len(values)).all():
        raise DataError(
            f"{where}: is a Ragged whose samples lie outside its values; create it with Ragged.of or Ragged.packed"
        )
    return Ragged(_materialized(values, where), starts, lengths, item_shape)


def _from_tensors(values: Sequence[Any], where: str) -> Column:
    first = next(v for v in values if isinstance(v, Tensor))
    values = [_materialized(v, where) if isinstance(v, Tensor) else v for v in values]
    for i, v in enumerate(values):
        if not isinstance(v, Tensor):
            raise DataError(f"{where}: sample {i} is a {type(v).__name__}, others are tensors; write one or the other")
        if v.dtype != first.dtype or v.ndim != first.ndim or v.shape[1:] != first.shape[1:]:
            raise DataError(
                f"{where}: sample {i} is {v.dtype} {list(v.shape)}, sample 0 {first.dtype} {list(first.shape)};"
                " tensors of a column must agree in dtype and in all dimensions but the first"
            )
    if first.ndim == 0:
        return torch.stack(list(values))
    return Ragged.of(values)


_SCALARS = {str, int, float, bool, type(None)}
_MAX_DEPTH = 100  # of nested lists and dicts


def _checked_object(value: Any, where: str, sample: int, depth: int = 0) -> Any:
    """Refuses values that JSON would change, whether or not they are sent to another worker."""
    kind = type(value)
    if kind in _SCALARS:
        return value
    if depth > _MAX_DEPTH:
        raise DataError(f"{where}: sample {sample} nests lists or dicts more than {_MAX_DEPTH} deep; flatten it")
    if kind is list:
        for v in value:
            _checked_object(v, where, sample, depth + 1)
        return value
    if kind is dict and all(type(k) is str for k in value):
        for v in value.values():
            _checked_object(v, where, sample, depth + 1)
        return value
    name = "dict with keys that are not text" if kind is dict else kind.__name__
    raise DataError(
        f"{where}: sample {sample} holds a {name}; a value must be a tensor, text, a number, a boolean, None,"
        " or a list or dict (with text keys) of these"
    )


def copy_objects(values: list[Any]) -> list[Any]:
    """Returns a deep copy of a column of objects, so that its reader may change it."""
    return list(values) if set(map(type, values)) <= _SCALARS else [_copy(v) for v in values]


def _copy(value: Any) -> Any:
    if type(value) is list:
        return [_copy(v) for v in value]
    if type(value) is dict:
        return {k: _copy(v) for k, v in value.items()}
    return value
