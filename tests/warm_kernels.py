"""Loads the compiled kernels in the server that tests' workers are forks of: once, not in each of them."""

from copy import deepcopy

import numpy as np
import torch

from distflow.cpu import kernels
from distflow.rollout.builtin.generator import CacheLimits, Generator
from distflow.rollout.engine import Request, SamplingParams
from tiny import pair, side_by_side


def _generate() -> None:
    model = deepcopy(pair("qwen2").ours)
    generator = Generator(model, CacheLimits(1, 1 << 20, 4), torch.device("cpu"))
    for _ in range(2):
        for sample_id in range(2):
            generator.add_request(Request(sample_id, (3, 4), SamplingParams(2), 0))
        while generator.has_unfinished:
            generator.step()
        side_by_side(model)  # for the second time


def _train() -> None:
    rows, row = [np.ones((2, 16), np.float32) for _ in range(5)], np.ones(16, np.float32)
    kernels.norm_backward(*rows[:2], row, np.float32(1), rows[2], row.copy())
    kernels.gate(*rows[:3])
    kernels.gate_backward(*rows)
    columns = np.zeros(2, np.int64), np.ones(2, np.float32), np.ones(2, np.float32)
    kernels.token_logprobs(rows[0], *columns)
    kernels.token_logprobs_backward(rows[0], *columns)


torch.set_num_threads(1)  # a fork of a process with threads would wait for them
_generate()
_train()
