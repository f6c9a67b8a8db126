"""Float32 kernels compiled by numba for the CPU they run on: matrix products, and what a model does between them.

Each fuses what takes torch several operations, whose overhead in a decoding step is larger than their work. They take
numpy arrays, write in place or into `out`, and run in one thread without the GIL. Only `cpu` imports this package.
"""

from distflow.cpu.kernels.attention import ROWS, attend, attend_backward, write_pages
from distflow.cpu.kernels.layers import (
    after_attention,
    before_attention,
    exp,
    gate,
    gate_backward,
    gumbel_sample,
    log,
    norm,
    norm_backward,
    tanh,
    token_logprobs,
    token_logprobs_backward,
)
from distflow.cpu.kernels.products import PANEL, linear, multiply, pack, unpack

__all__ = [
    "PANEL",
    "ROWS",
    "after_attention",
    "attend",
    "attend_backward",
    "before_attention",
    "exp",
    "gate",
    "gate_backward",
    "gumbel_sample",
    "linear",
    "log",
    "multiply",
    "norm",
    "norm_backward",
    "pack",
    "tanh",
    "token_logprobs",
    "token_logprobs_backward",
    "unpack",
    "write_pages",
]
