"""A batch: columns over samples. Ragged or one value per sample, tensors of any dtype or Python objects. No padding."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distflow.data.balance import Ints
from distflow.data.copy_ranges import copy_runs
from distflow.errors import DataError, suggest


@dataclass(frozen=True)
class Ragged:
    """One tensor per sample, of different lengths: sample i is `values[starts[i] : …]`, shaped [lengths[i], *trail].

    `values` is flat and may hold other things in between, so picking and reordering samples copies nothing.
    """

    values: Tensor  # [any]
    starts: Ints  # [samples], in elements
    lengths: Ints  # [samples], in rows of `trail` elements
    trail: tuple[int, ...] = ()

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> "Ragged":
        """Join tensors [length_i, *trail] that agree in dtype and trail."""
        trail = tuple(tensors[0].shape[1:])
        lengths = np.array([len(t) for t in tensors], np.int64)
        return cls.packed(torch.cat([t.reshape(-1) for t in tensors]), lengths, trail)

    @classmethod
    def packed(cls, values: Tensor, lengths: Ints, trail: tuple[int, ...] = ()) -> "Ragged":
        """From values that stand one after the other."""
        ends = np.cumsum(lengths) * stride_of(trail)
        return cls(values.reshape(-1), ends - lengths * stride_of(trail), lengths, trail)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> Tensor:
        start, count = int(self.starts[i]), int(self.lengths[i]) * stride_of(self.trail)
        return self.values[start : start + count].view(int(self.lengths[i]), *self.trail)

    def __iter__(self) -> Iterator[Tensor]:
        return (self[i] for i in range(len(self)))

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    def select(self, index: Ints) -> "Ragged":
        return Ragged(self.values, self.starts[index], self.lengths[index], self.trail)

    def joined(self) -> Tensor:
        """All samples one after the other: [sum of lengths, *trail]. A view where they already stand so."""
        counts = self.lengths * stride_of(self.trail)
        ends = np.cumsum(counts)
        total = int(counts.sum())
        first = int(self.starts[0]) if len(self) else 0
        if (self.starts == first + ends - counts).all():
            return self.values[first : first + total].view(int(self.lengths.sum()), *self.trail)
        width = self.values.element_size()
        out = torch.empty(total * width, dtype=torch.uint8, device=self.values.device)
        starts, places, sizes = (x[None] * width for x in (self.starts, ends - counts, counts))
        copy_runs([self.values], starts, out, places, sizes)
        return out.view(self.dtype).view(int(self.lengths.sum()), *self.trail)

    def padded(self, fill: float = 0) -> Tensor:
        """[samples, longest, *trail]: for a model's forward pass, not for keeping."""
        longest = int(self.lengths.max(initial=0))
        out = self.values.new_full((len(self), longest, *self.trail), fill)
        for i, row in enumerate(self):
            out[i, : len(row)] = row
        return out


Column = Tensor | Ragged | list[Any]


class Batch:
    """Some samples of a step and some of their fields; what a node is given. `batch["response"]` is a column."""

    def __init__(self, ids: Ints, groups: Ints, columns: Mapping[str, Column]) -> None:
        self.ids, self.groups, self.columns = ids, groups, dict(columns)

    def __len__(self) -> int:
        return len(self.ids)

    def __contains__(self, field: str) -> bool:
        return field in self.columns

    def __getitem__(self, field: str) -> Any:
        """A Column; which kind of it, the reader of a field knows."""
        if field not in self.columns:
            raise DataError(
                f"the batch has no field '{field}'{suggest(field, self.columns)}; a node gets what it reads"
            )
        return self.columns[field]

    def select(self, index: Ints) -> "Batch":
        return Batch(self.ids[index], self.groups[index], {f: select(c, index) for f, c in self.columns.items()})


def select(column: Column, index: Ints) -> Column:
    if isinstance(column, Ragged):
        return column.select(index)
    if isinstance(column, Tensor):
        return column[torch.from_numpy(index)]
    return [column[i] for i in index]


def join(columns: Sequence[Column]) -> Column:
    """One column after the other, in memory of its own."""
    first = columns[0]
    if isinstance(first, Ragged):
        rows = [c for c in columns if isinstance(c, Ragged)]
        values = torch.cat([c.joined().reshape(-1) for c in rows])
        return Ragged.packed(values, np.concatenate([c.lengths for c in rows]), first.trail)
    if isinstance(first, Tensor):
        return torch.cat([c for c in columns if isinstance(c, Tensor)])
    return [value for c in columns for value in c]


def as_column(value: Any, samples: int, where: str) -> Column:
    """What a node wrote, as a column of `samples` values; `where` names node and field in errors."""
    if isinstance(value, np.ndarray | Tensor) and value.ndim == 0:
        raise DataError(f"{where}: is a single number; write one value per sample ({samples})")
    if isinstance(value, np.ndarray):
        value = value.tolist() if value.dtype.kind in "OU" else _of_array(value, where)
    if isinstance(value, list | tuple):
        value = list(value)
    if not isinstance(value, Tensor | Ragged | list):
        raise DataError(
            f"{where}: is a {type(value).__name__}; write a tensor, a Ragged or a list with one value per sample"
        )
    if isinstance(value, Tensor):
        value = _solid(value, where)
    if isinstance(value, Ragged):
        value = _sound(value, where)
    if len(value) != samples:
        raise DataError(f"{where}: has {len(value)} values for {samples} samples; write one value per sample, in order")
    if isinstance(value, Tensor | Ragged):
        return value
    rows: list[Any] = value
    types = set(map(type, rows))
    if types <= _PLAIN:
        return rows
    if any(issubclass(t, Tensor | np.ndarray) for t in types):
        return _from_tensors([_of_array(v, where) if isinstance(v, np.ndarray) else v for v in rows], where)
    return [_plain(v.item() if isinstance(v, np.generic) else v, where, i) for i, v in enumerate(rows)]


def _of_array(array: Any, where: str) -> Tensor:
    try:
        return torch.from_numpy(np.require(array, array.dtype.newbyteorder("="), ["C", "W"]))
    except TypeError:
        raise DataError(f"{where}: has NumPy's {array.dtype}; write numbers, truth values or text") from None


def _solid(tensor: Tensor, where: str) -> Tensor:
    """Whose values are in memory, one after the other: one that was expanded or conjugated has them nowhere yet."""
    if tensor.is_nested or tensor.is_meta or tensor.is_quantized or tensor.layout != torch.strided:
        raise DataError(f"{where}: is a tensor without plain values in memory; convert it, for example by .to_dense()")
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _sound(ragged: Ragged, where: str) -> Ragged:
    """Every sample of it is within its values."""
    values, starts, lengths, trail = ragged.values, ragged.starts, ragged.lengths, ragged.trail
    counts = [x for x in (starts, lengths) if isinstance(x, np.ndarray) and x.dtype.kind in "iu" and x.ndim == 1]
    fits = len(counts) == 2 and len(starts) == len(lengths) and isinstance(values, Tensor) and values.ndim == 1
    fits = fits and all(d >= 0 for d in trail) and bool((starts >= 0).all() and (lengths >= 0).all())
    if not fits or not (starts + lengths * stride_of(trail) <= len(values)).all():
        raise DataError(f"{where}: is a Ragged whose samples are not in its values; make it with Ragged.of or .packed")
    return Ragged(_solid(values, where), starts, lengths, trail)


def _from_tensors(rows: Sequence[Any], where: str) -> Column:
    first = next(v for v in rows if isinstance(v, Tensor))
    rows = [_solid(v, where) if isinstance(v, Tensor) else v for v in rows]
    for i, v in enumerate(rows):
        if not isinstance(v, Tensor):
            raise DataError(f"{where}: sample {i} is a {type(v).__name__}, others are tensors; write one or the other")
        if v.dtype != first.dtype or v.ndim != first.ndim or v.shape[1:] != first.shape[1:]:
            raise DataError(
                f"{where}: sample {i} is {v.dtype} {list(v.shape)}, sample 0 {first.dtype} {list(first.shape)};"
                " tensors of a column agree in dtype and in all dimensions but the first"
            )
    if first.ndim == 0:
        return torch.stack(list(rows))
    return Ragged.of(rows)


_PLAIN = {str, int, float, bool, type(None)}
_DEEPEST = 100  # lists in lists


def _plain(value: Any, where: str, sample: int, depth: int = 0) -> Any:
    """Objects travel as JSON; refuse what would come back as something else, whether or not it travels this time."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if depth > _DEEPEST:
        raise DataError(
            f"{where}: sample {sample} holds lists or dicts in each other, {_DEEPEST} deep and more; flatten it"
        )
    if kind is list:
        for v in value:
            _plain(v, where, sample, depth + 1)
        return value
    if kind is dict and all(type(k) is str for k in value):
        for v in value.values():
            _plain(v, where, sample, depth + 1)
        return value
    shown = "dict with keys that are not text" if kind is dict else kind.__name__
    raise DataError(
        f"{where}: sample {sample} holds a {shown}; a value is a tensor, text, a number, a truth value, None,"
        " or a list or dict (keys: text) of these"
    )


def own_copy(rows: list[Any]) -> list[Any]:
    """A list of objects that a reader may change as it likes."""
    return list(rows) if set(map(type, rows)) <= _PLAIN else [_copy(v) for v in rows]


def _copy(value: Any) -> Any:
    if type(value) is list:
        return [_copy(v) for v in value]
    if type(value) is dict:
        return {k: _copy(v) for k, v in value.items()}
    return value


def stride_of(trail: tuple[int, ...]) -> int:
    """Elements per row."""
    stride = 1
    for d in trail:
        stride *= d
    return stride
