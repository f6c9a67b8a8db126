"""Values of the device that the host reads together: to read each as soon as it is there would wait for the device."""

from collections.abc import Callable

import torch
from torch import Tensor

from distflow.batch.context import MetricLog, Reduce


class Readings:
    """Collects values while the device computes, and what is done with them once they are in host memory."""

    def __init__(self) -> None:
        self._values: list[Tensor] = []
        self._uses: list[Callable[[Tensor], None]] = []

    def add(self, values: Tensor, use: Callable[[Tensor], None]) -> None:
        """Calls `use` with these values, in host memory, when all are read."""
        self._values.append(values.detach())
        self._uses.append(use)

    def metric(self, log: MetricLog, name: str, value: Tensor, count: float = 1, reduce: Reduce = "mean") -> None:
        self.add(value, lambda read: log.log(name, float(read), count, reduce))

    def read(self) -> None:
        """Waits for the device once for each dtype, and uses the values in the order in which they were added."""
        by_dtype: dict[torch.dtype, list[int]] = {}
        for i, values in enumerate(self._values):
            by_dtype.setdefault(values.dtype, []).append(i)
        for places in by_dtype.values():
            parts = [self._values[i] for i in places]
            read = torch.cat([p.flatten() for p in parts]).cpu().split([p.numel() for p in parts])
            for i, values in zip(places, read, strict=True):
                self._values[i] = values.view(self._values[i].shape)
        for values, use in zip(self._values, self._uses, strict=True):
            use(values)
        self._values.clear()
        self._uses.clear()
