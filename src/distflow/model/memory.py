"""The memory of a device, and a check that a KV cache fits into it."""

import os
from pathlib import Path

import torch

from distflow.errors import ConfigError
from distflow.util.text import human_bytes

_CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")


def check_kv_cache(cache_bytes: int, device: torch.device) -> None:
    """Raises if a KV cache of this size can never be allocated on the device."""
    total = total_memory(device)
    if total is not None and cache_bytes > total:
        raise ConfigError(
            f"rollout.kv_cache_gb: {human_bytes(cache_bytes)} of KV cache do not fit on {device}, which has"
            f" {human_bytes(total)}; lower it"
        )


def kv_budget(cache_bytes: int, per_token: int, longest: int, most: int) -> str:
    """Says how many sequences, at most `most`, a KV cache holds at once: of the longest allowed, and shorter ones."""

    def count(tokens: int) -> int:
        return min(most, cache_bytes // (tokens * per_token))

    lengths = [longest] if count(longest) == most else [-(-longest // part) for part in (16, 4, 1)]
    counts = " or ".join(f"{count(n):,} of {n:,} tokens" for n in lengths)
    each = human_bytes(longest * per_token)
    return f"{human_bytes(cache_bytes)}; sequences at once: {counts}, the longest allowed ({each} each)"


def total_memory(device: torch.device) -> int | None:
    """Returns the bytes of memory of a device, or of this host or container; None if unknown."""
    if device.type != "cpu":
        return torch.accelerator.get_memory_info(device)[1] if hasattr(torch.accelerator, "get_memory_info") else None
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _CONTAINER_LIMIT.read_text().strip() if _CONTAINER_LIMIT.exists() else "max"
    return min(total, int(limit)) if limit.isdecimal() else total
