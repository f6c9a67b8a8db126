"""AdamW with moments of 8 bits, which are torchao's, for parameters in shards."""

import logging
from contextlib import nullcontext
from math import prod
from typing import Any

import torch
from torch import Tensor

from distflow.config.schema import MOST_CUTS_8BIT
from distflow.train.moments import Moment
from distflow.weights.shards import TensorSpec

logging.disable(logging.WARNING)  # it tells which of its kernels do not load; none is used here
from torchao.optim import AdamW8bit as TorchaoAdamW8bit  # noqa: E402
from torchao.optim.subclass_8bit import OptimState8bit  # noqa: E402

logging.disable(logging.NOTSET)

SIGNED = {"exp_avg": True, "exp_avg_sq": False}
CODES, SCALE = "_codes", "_scale"
BLOCKS = (256, 128, 64, 32, 16)  # numbers of a row that share a scale: the most that fit
LEAST = 4096  # numbers of a parameter, below which moments are float32, as in torchao


def moments_of(spec: TensorSpec) -> dict[str, Moment]:
    """Returns the moments of a parameter by name. Blocks are of whole rows, so that they are the same on any layout."""
    *rows, columns = spec.shape or (1,)
    block = next((b for b in BLOCKS if columns % (MOST_CUTS_8BIT * b) == 0), None)
    if not rows or block is None or prod(spec.shape) < LEAST:
        return {name: Moment(spec) for name in SIGNED}
    scales = TensorSpec(spec.name, (*rows, columns // block), spec.tp_dim)
    parts = {CODES: Moment(spec, dtype=torch.uint8), SCALE: Moment(scales)}
    return {name + part: moment for name in SIGNED for part, moment in parts.items()}


class AdamW8bit(TorchaoAdamW8bit):  # type: ignore[misc]
    """torchao's step, for parameters whose `moments_of` are in the state, which checkpoints have as plain tensors.

    Like fused AdamW it divides gradients by `grad_scale`, and does nothing if `found_inf` is 1, for which it waits.
    """

    found_inf: Tensor | None = None
    grad_scale: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is None
        if self.found_inf is not None and self.found_inf.item():
            return
        for group in self.param_groups:
            group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32)
            for p in group["params"]:
                if p.grad is None:
                    continue
                if not p.numel():
                    self.state[p]["step"] += 1
                    p.grad = None
                    continue
                if self.grad_scale is not None:
                    p.grad = p.grad / self.grad_scale
                _pack(self.state[p])
        on_cpu = self.param_groups[0]["params"][0].is_cpu
        with torch.compiler.set_stance("force_eager") if on_cpu else nullcontext():  # for which a compiler is slower
            super().step()


def _pack(state: dict[str, Any]) -> None:
    """Makes torchao's tensors of codes and scales, in the same memory."""
    for name, signed in SIGNED.items():
        if name not in state:
            codes, scale = state[name + CODES], state[name + SCALE]
            table = OptimState8bit.zeros((1,), signed, 1, codes.device).qmap
            state[name] = OptimState8bit(codes, scale.view(-1), table, signed, scale.dtype)
