"""DistFlow: RL post-training of language models, fully distributed. Importing this imports no torch."""

import os
from pathlib import Path

from distflow.flow import Flow, Node, flow, node

__all__ = ["Flow", "Node", "flow", "node"]


def _avoid_trapped_amx() -> None:
    """Some virtual machines advertise AMX and then kill who uses it: keep oneDNN from it, before torch is imported."""
    cpuinfo = Path("/proc/cpuinfo")
    flags = cpuinfo.read_text().partition("flags")[2].partition("\n")[0].split() if cpuinfo.exists() else []
    if "amx_tile" in flags and "hypervisor" in flags:
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")


_avoid_trapped_amx()
