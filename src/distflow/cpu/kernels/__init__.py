"""Float32 kernels compiled by numba for the CPU they run on: matrix products, and what a model does between them.

Each fuses what takes torch several operations, whose overhead in a decoding step is larger than their work. They take
numpy arrays, write in place or into `out`, and run in one thread without the GIL. Only `cpu` imports this package.
"""

from distflow.cpu.kernels.layers import (
    after_attention,
    attend,
    before_attention,
    exp,
    gate,
    gate_backward,
    gumbel_sample,
    log,
    norm,
    norm_backward,
    token_logprobs,
    token_logprobs_backward,
)
from distflow.cpu.kernels.products import PANEL, add_linear, multiply, pack, unpack

__all__ = [
    "PANEL",
    "add_linear",
    "after_attention",
    "attend",
    "before_attention",
    "exp",
    "gate",
    "gate_backward",
    "gumbel_sample",
    "log",
    "multiply",
    "norm",
    "norm_backward",
    "pack",
    "token_logprobs",
    "token_logprobs_backward",
    "unpack",
]
