"""Sizes of the pieces of work: as much as stays in the caches of a CPU, or keeps an accelerator busy.

Imports no torch.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """Sizes of blocks, for one kind of device."""

    logits: int  # logits of the trainer that are held at once
    logit_tokens: int  # tokens of a chunk of them, at least, as each chunk reads the whole output layer
    sampled_logits: int  # logits from which tokens are sampled at once
    checksum: int  # elements of weights
    prompt_tokens: int  # tokens of prompts that vLLM computes at once


CPU = Sizes(logits=1 << 20, logit_tokens=128, sampled_logits=1 << 20, checksum=1 << 18, prompt_tokens=1 << 11)
ACCELERATOR = Sizes(  # logits: 1 GiB of float32
    logits=1 << 28, logit_tokens=1024, sampled_logits=1 << 26, checksum=1 << 26, prompt_tokens=1 << 13
)


def sizes_of(device_type: str) -> Sizes:
    return CPU if device_type == "cpu" else ACCELERATOR
