"""DistFlow: RL post-training of language models, fully distributed. Importing this imports no torch."""

import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distflow.flow import Flow, Node, flow, node
from distflow.plan import Layout, Plan

if TYPE_CHECKING:
    from distflow.algo.tokens import Loss, Tokens
    from distflow.data.batch import Batch, Ragged
    from distflow.data.context import Context

__all__ = ["Batch", "Context", "Flow", "Layout", "Loss", "Node", "Plan", "Ragged", "Tokens", "flow", "node"]

_WITH_TORCH = {
    "Batch": "distflow.data.batch",
    "Context": "distflow.data.context",
    "Loss": "distflow.algo.tokens",
    "Ragged": "distflow.data.batch",
    "Tokens": "distflow.algo.tokens",
}


def __getattr__(name: str) -> Any:
    """Names that need torch are imported when they are asked for."""
    if name not in _WITH_TORCH:
        raise AttributeError(f"module 'distflow' has no attribute '{name}'")
    return getattr(importlib.import_module(_WITH_TORCH[name]), name)


def _avoid_trapped_amx() -> None:
    """Some virtual machines advertise AMX and then kill who uses it: keep oneDNN from it, before torch is imported."""
    cpuinfo = Path("/proc/cpuinfo")
    flags = cpuinfo.read_text().partition("flags")[2].partition("\n")[0].split() if cpuinfo.exists() else []
    if "amx_tile" in flags and "hypervisor" in flags:
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")


_avoid_trapped_amx()
