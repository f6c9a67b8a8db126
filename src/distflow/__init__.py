"""DistFlow: RL post-training of language models, fully distributed. Importing this imports no torch."""

import distflow.util.interrupt  # first, as Ctrl-C may come while the rest is imported

# isort: split
import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

# The functions `plan` and `run` have the names of packages, which are imported first, so that no later import puts one
# in a function's place. `from distflow.run.job import Job` works; `distflow.run.job` as an attribute does not. `parent`
# remembers who started this process.
import distflow.plan
import distflow.run
import distflow.util.parent  # noqa: F401
from distflow.api import check, evaluate, export, gpu_check, plan, run
from distflow.flow import Flow, Node, flow, node
from distflow.plan import Layout, Plan
from distflow.roles.role import Role
from distflow.util.version import __version__

if TYPE_CHECKING:
    from distflow.algo.tokens import Loss, Tokens
    from distflow.batch.batch import Batch, Ragged
    from distflow.batch.context import Context

__all__ = [
    "Batch",
    "Context",
    "Flow",
    "Layout",
    "Loss",
    "Node",
    "Plan",
    "Ragged",
    "Role",
    "Tokens",
    "__version__",
    "check",
    "evaluate",
    "export",
    "flow",
    "gpu_check",
    "node",
    "plan",
    "run",
]

_WITH_TORCH = {
    "Batch": "distflow.batch.batch",
    "Context": "distflow.batch.context",
    "Loss": "distflow.algo.tokens",
    "Ragged": "distflow.batch.batch",
    "Tokens": "distflow.algo.tokens",
}


def __getattr__(name: str) -> Any:
    """Imports names that need torch when they are first used."""
    if name not in _WITH_TORCH:
        raise AttributeError(f"module 'distflow' has no attribute '{name}'")
    return getattr(importlib.import_module(_WITH_TORCH[name]), name)


def _avoid_trapped_amx() -> None:
    """Keeps oneDNN from AMX, before torch is imported: some virtual machines advertise it and kill who uses it."""
    cpuinfo = Path("/proc/cpuinfo")
    flags = cpuinfo.read_text().partition("flags")[2].partition("\n")[0].split() if cpuinfo.exists() else []
    if "amx_tile" in flags and "hypervisor" in flags:
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")


_avoid_trapped_amx()
