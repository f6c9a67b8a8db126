"""vLLM's own sampler, which may run a step ahead of the host. Its noise is not a function of the sample."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from distflow.config.schema import RolloutConfig
from distflow.errors import ConfigError
from distflow.rollout.engine import SamplingParams
from distflow.util.seeds import mix


def check_own_sampler(config: RolloutConfig) -> None:
    """Raises where its log-probs would not be those of the whole distribution at the temperature."""
    changed = [name for name, on in _changes(config) if on]
    if config.temperature not in (0, 1) and changed:
        raise ConfigError(
            f"rollout.vllm.sampler: vLLM has the log-probs at a temperature of {config.temperature:g} only of what"
            f" rollout.{changed[0]} leaves; set one of the two to its default, or use `sampler: distflow`"
        )


def _changes(config: RolloutConfig) -> list[tuple[str, bool]]:
    return [
        ("top_p", config.top_p < 1),
        ("top_k", config.top_k > 0),
        ("min_p", config.min_p > 0),
        ("repetition_penalty", config.repetition_penalty != 1),
        ("min_tokens", config.min_tokens > 0),
    ]


def logprobs_mode(config: RolloutConfig) -> str:
    """Returns when vLLM takes log-probs: of the logits, or once they are divided by the temperature."""
    return "raw_logprobs" if config.temperature in (0, 1) else "processed_logprobs"


def sampling_arguments(params: SamplingParams) -> dict[str, Any]:
    """Returns the parameters of a request."""
    return {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "repetition_penalty": params.repetition_penalty,
        "logprobs": 0,  # of the sampled token
        "flat_logprobs": True,
    }


def logprobs_of(output: Any) -> NDArray[np.float32]:
    return np.array(output.logprobs.logprobs, np.float32)


class Noise:
    """The random numbers of vLLM's sampler: a state of its own, from a seed, the version of the weights and the
    replica. All ranks of that draw the same, whatever else the process draws."""

    def __init__(self, device: torch.device, replica: int) -> None:
        self._device, self._replica = device, replica
        self._module: Any = torch if device.type == "cpu" else torch.get_device_module(device)
        self._state: Tensor | None = None

    def reset(self) -> None:
        """Forgets its state before the next request."""
        self._state = None

    def seed(self, seed: int, version: int) -> None:
        if self._state is None:
            words = np.array([seed & (2**64 - 1)], np.uint64)
            for part in (version + 1, self._replica):
                words = mix(words + np.uint64(part))
            self._state = torch.Generator(self._device).manual_seed(int(words[0] >> np.uint64(1))).get_state()

    @contextmanager
    def drawn(self) -> Iterator[None]:
        if self._state is None:
            yield
            return
        before = self._module.get_rng_state()
        self._module.set_rng_state(self._state)
        try:
            yield
        finally:
            self._state = self._module.get_rng_state()
            self._module.set_rng_state(before)
