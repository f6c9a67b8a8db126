"""Restores environment, thread count and RNG state that initialising a library changed."""

import os
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def undisturbed_process(settings: Mapping[str, str], prefix: str) -> Iterator[None]:
    """Sets variables of the environment; these stay, and all others whose name begins with `prefix`."""
    os.environ |= settings
    environment, set_num_threads, threads = dict(os.environ), torch.set_num_threads, torch.get_num_threads()
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        for key in os.environ.keys() - environment.keys():
            if not key.startswith(prefix):
                del os.environ[key]
        os.environ |= environment
        torch.set_num_threads = set_num_threads  # which some replace
        torch.set_num_threads(threads)
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
