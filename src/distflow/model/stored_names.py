"""Finds weights in transformers' files where these have other names or shapes than a model.

A file has three matrices for each expert, or stacks of all experts of a layer, with gate and up in one tensor. Older
files of Qwen's vision-language models name the language model as if it were alone.
"""

import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Read = Callable[[str, tuple[slice, ...]], Tensor]
_OURS = re.compile(r"(.+\.)mlp\.(?:experts\.(gate_proj|up_proj|down_proj)|gate\.weight)")
_STACKED = re.compile(r"(.+\.mlp\.experts\.)gate_up_proj")
_OLDER = {"model.language_model.": "model.", "model.visual.": "visual."}  # beginning of a name → in older files
_MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


@dataclass(frozen=True)
class StoredTensor:
    """A parameter in files: one tensor, or one for each expert."""

    names: Sequence[str]
    shape: tuple[int, ...]  # of each
    first: int = 0  # where it begins in the second dimension, beside another one

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        return ((name, self.shape) for name in self.names)

    def read(self, read: Read, part: tuple[slice, ...]) -> Tensor:
        """Reads a part of the parameter; `read` does so for a tensor of the files."""
        if len(part) > len(self.shape):
            experts = [read(name, part[1:]) for name in self.names[part[0]]]
            empty = (0, *(s.stop - s.start for s in part[1:]))
            return torch.stack(experts) if experts else torch.empty(empty)
        if self.first:
            rows = part[1]
            part = (part[0], slice(rows.start + self.first, rows.stop + self.first), *part[2:])
        return read(self.names[0], part)


def find_stored(name: str, shape: Sequence[int], files: Container[str]) -> StoredTensor:
    """Returns where a parameter is, given the names of what is in the files."""
    here = StoredTensor([name], tuple(shape))
    if name not in files:
        older = (old + name.removeprefix(new) for new, old in _OLDER.items() if name.startswith(new))
        if found := next((n for n in older if n in files), None):
            return StoredTensor([found], tuple(shape))
    match = None if name in files else _OURS.fullmatch(name)
    if match is None:
        return here
    layer, matrix = match.groups()
    if matrix is None:
        return StoredTensor([f"{layer}block_sparse_moe.gate.weight"], tuple(shape))
    experts, *size = shape
    stacked = f"{layer}mlp.experts.gate_up_proj"
    if stacked in files:
        rows, width = size
        return StoredTensor([stacked], (experts, 2 * rows, width), rows * (matrix == "up_proj"))
    for module, leaf in (("mlp", matrix), ("block_sparse_moe", _MIXTRAL[matrix])):
        names = [f"{layer}{module}.experts.{e}.{leaf}.weight" for e in range(experts)]
        if names[0] in files:
            return StoredTensor(names, tuple(size))
    return here


def read_stacked(read: Read, name: str, shape: Sequence[int]) -> Tensor:
    """Returns a whole parameter of transformers' model, of this name, from a reader of ours."""
    match = _STACKED.fullmatch(name)
    if match is None:
        return read(name, tuple(slice(0, n) for n in shape))
    experts, rows, width = shape
    part = slice(0, experts), slice(0, rows // 2), slice(0, width)
    return torch.cat([read(match[1] + matrix, part) for matrix in ("gate_proj", "up_proj")], 1)


def stored_tensors(shapes: Mapping[str, Sequence[int]], files: Container[str]) -> dict[str, StoredTensor]:
    return {name: find_stored(name, shape, files) for name, shape in shapes.items()}
