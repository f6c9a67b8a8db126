"""Imported by the server that tests' workers are forks of: compiled kernels are loaded once, not by each of them."""

from copy import deepcopy

import numpy as np
import torch

from distflow.engine.cpu import kernels
from distflow.engine.model.llama_family import together
from distflow.engine.rollout.builtin import Rollout
from distflow.engine.rollout.sampling import Sampling
from distflow.engine.weights import room
from engine.tiny import pair


def _generate() -> None:
    model = deepcopy(pair("qwen2").ours)
    engine = Rollout(model, 1, 1 << 20, 4)
    for _ in range(2):
        engine.generate([[3, 4]], np.zeros(2, np.int64), np.arange(2), Sampling(2), 0)
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        made = room(shapes, together(model), torch.float32, torch.device("cpu"))  # and then side by side
        for name, p in model.named_parameters():
            p.data = made[name].copy_(p.data)


def _train() -> None:
    rows, row = [np.ones((2, 16), np.float32) for _ in range(5)], np.ones(16, np.float32)
    kernels.norm_back(*rows[:2], row, np.float32(1), rows[2], row.copy())
    kernels.gate(*rows[:3])
    kernels.gate_back(*rows)
    pair_of = np.zeros(2, np.int64), np.ones(2, np.float32), np.ones(2, np.float32)
    kernels.score(rows[0], *pair_of)
    kernels.score_back(rows[0], *pair_of)


torch.set_num_threads(1)  # a fork of a process with threads would wait for them
_generate()
_train()
