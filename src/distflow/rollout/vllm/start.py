"""Starts vLLM on one rank of a replica, in a process with others in it."""

import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

BLOCK = 32  # tokens of KV cache that are allocated together, and shared by requests that begin alike


def start_vllm(replica: Sequence[int], rank: int, device: torch.device, arguments: Mapping[str, Any]) -> Any:
    """Starts vLLM on one rank of a replica, with weights that are yet to be filled; `arguments` win over ours."""
    from vllm import EngineArgs
    from vllm.v1.engine import core
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.executor.uniproc_executor import UniProcExecutor
    from vllm.v1.worker import gpu_worker

    class Executor(UniProcExecutor):  # type: ignore[misc]
        """Each rank of a replica schedules for itself; all come to the same decisions."""

        def _distributed_args(self) -> tuple[str, int, int]:
            # What follows the colon names the memory that the ranks of one host share.
            name = f"distflow:{socket.gethostname()}-{os.environ.get('MASTER_PORT', os.getpid())}-{replica[0]}"
            return name, replica.index(rank), device.index or 0

    on_cpu = device.type == "cpu"
    ours: dict[str, Any] = {
        "tensor_parallel_size": len(replica),
        "distributed_executor_backend": Executor,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "block_size": BLOCK if on_cpu else None,
        "enforce_eager": on_cpu,
        "enable_prefix_caching": True,
        "enable_sleep_mode": not on_cpu,
        "gpu_memory_utilization": 0.01,  # the size of the KV cache is given; the rest may be a trainer's
        "disable_log_stats": True,
    }
    given = EngineArgs(**ours | dict(arguments))
    with (
        patch.object(gpu_worker, "init_distributed_environment", lambda *a, **k: _init_groups(replica, rank, device)),
        _cpu_set_up() if on_cpu else nullcontext(),
    ):
        core.cleanup_dist_env_and_memory = lambda: None  # at exit it would destroy process groups, the run's among them
        return LLMEngine.from_engine_args(given, enable_multiprocessing=False)


def _init_groups(replica: Sequence[int], rank: int, device: torch.device) -> None:
    """Makes vLLM's process groups of a replica's ranks alone; vLLM would make every rank of the run create them all."""
    from vllm.distributed import parallel_state as state
    from vllm.platforms import current_platform

    new_group: Any = dist.new_group
    backend, local_rank = current_platform.dist_backend, device.index or 0
    with patch.object(dist, "new_group", lambda *a, **k: new_group(*a, **k, use_local_synchronization=True)):
        state._WORLD = state.init_world_group(list(replica), local_rank, backend)
        state._NODE_COUNT = state._node_count(state._WORLD.cpu_group)
        make = state.init_model_parallel_group
        state._TP = state._ETP = make([list(replica)], local_rank, backend, group_name="tp")
        alone = make([[rank]], local_rank, backend, group_name="alone")
    state._PP = state._DP = state._DCP = state._PCP = alone


@contextmanager
def _cpu_set_up() -> Iterator[None]:
    """Starts vLLM for CPU in a way that suits a process with others in it.

    After loading it would pack weights for oneDNN and never look again at the synced ones. It would bind all
    memory to one NUMA node; compile a function of embeddings, which takes a C++ compiler and half a minute; fail
    once numba is in use, in whose bindings it looks for kernels; and use AMX where oneDNN is kept from it, which ends
    the process on machines that trap it.
    """
    from vllm.model_executor.layers import utils, vocab_parallel_embedding
    from vllm.triton_utils import dispatcher

    class System:
        @property
        def modules(self) -> dict[str, Any]:
            return {name: m for name, m in sys.modules.items() if not name.startswith("llvmlite")}

    def dispatch_linear(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = nn.functional.linear

    amx = torch.cpu._is_amx_tile_supported() and "AMX" in os.environ.get("ONEDNN_MAX_CPU_ISA", "AMX")
    masked = vocab_parallel_embedding.get_masked_input_and_mask
    vocab_parallel_embedding.get_masked_input_and_mask = getattr(masked, "_torchdynamo_orig_callable", masked)
    with (
        patch.object(utils, "dispatch_cpu_unquantized_gemm", dispatch_linear),
        patch.object(torch.ops._C, "init_cpu_memory_env", lambda nodes: None),
        patch.object(dispatcher, "sys", System()),
        patch.object(torch.cpu, "_is_amx_tile_supported", lambda: amx),
    ):
        yield
