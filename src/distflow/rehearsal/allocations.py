"""Counts the memory of a device by tensors without memory that stand for its own."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

_BLOCK = 512  # bytes that an allocation of CUDA's caching allocator is a multiple of


class Allocations(TorchDispatchMode):
    """While it is entered, tensors of torch's `meta` device are those of a device: their storages are counted while
    they live, by what they are for. Operations that need another rank, or the numbers themselves, give zeros."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now: Counter[str] = Counter()  # bytes by label
        self._most: dict[str, tuple[int, Mapping[str, int]]] = {}  # label of an allocation → the most, what it was
        self._total = 0
        self._live: dict[int, tuple[str, int]] = {}  # storage → its label and its bytes
        self._label = "other"

    @contextmanager
    def label(self, name: str) -> Iterator[None]:
        """Counts what is allocated inside under this name."""
        before, self._label = self._label, name
        try:
            yield
        finally:
            self._label = before

    def labelled(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.label(name):
                return function(*args, **kwargs)

        return call

    def peaks(self) -> dict[str, Mapping[str, int]]:
        """Returns what there was since the last call when it was most, for each label that was allocated just then.

        The largest of them is the peak.
        """
        peaks = {label: most for label, (_, most) in self._most.items()}
        self._most = {"": (self._total, +self.now)}
        return peaks

    def relabel(self, name: str) -> None:
        """Counts what is allocated from now on under this name, until the end of the `label` that this is in."""
        self._label = name

    def drop(self, label: str) -> None:
        """Counts no longer what has this label."""
        self._live = {key: live for key, live in self._live.items() if live[0] != label}
        self._total -= self.now.pop(label, 0)
        self.peaks()

    def note(self, tensor: Tensor) -> None:
        """Counts a tensor that is new, or whose storage may have been resized."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, -(-storage.nbytes() // _BLOCK) * _BLOCK
        label, old = self._live.get(key, (self._label, 0))
        if key not in self._live:
            weakref.finalize(storage, self._drop, key)
        self._live[key] = label, size
        self._add(label, size - old)

    def _drop(self, key: int) -> None:
        if key in self._live:
            label, size = self._live.pop(key)
            self._add(label, -size)

    def _add(self, label: str, size: int) -> None:
        self.now[label] += size
        self._total += size
        if size > 0 and self._total > self._most.get(label, (0,))[0]:
            self._most[label] = self._total, +self.now

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = self._run(op, args, kwargs)
        for t in tree_iter(result):
            if isinstance(t, Tensor) and t.is_meta:
                self.note(t.to_local() if isinstance(t, DTensor) else t)
        return result

    def _run(self, op: Any, args: Any, kwargs: Any) -> Any:
        name: str = op._schema.name
        if name.startswith("c10d::"):
            work = FakeWork().boxed()
            return work if len(op._schema.returns) == 1 else (args[0], work)
        if name == "aten::_local_scalar_dense" and args[0].is_meta:
            return 0
        to_host = kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cpu"
        if to_host and args and isinstance(args[0], Tensor) and args[0].is_meta:
            # As large as it is, host memory is not what is counted.
            return torch.zeros((), dtype=kwargs.get("dtype") or args[0].dtype).expand(args[0].shape)
        if name == "aten::copy_" and args[1].is_meta and not args[0].is_meta:
            return args[0]
        return op(*args, **kwargs)
