# mypy: ignore-errors
"""What verl and siiRL need to run on a CPU: they ask for CUDA or an NPU. Imported in their drivers and workers.

Only what touches a device is replaced; trainers, data planes, FSDP actors and losses are their own.
"""

import os

import torch
import torch.distributed as dist
import torch.distributed.fsdp
import transformers.generation.utils
from transformers import AutoConfig

_GIB = 1 << 30
_MEMORY = {
    "empty_cache": lambda: None,
    "set_device": lambda *_: None,
    "memory_allocated": lambda *_: 0,
    "memory_reserved": lambda *_: 0,
    "max_memory_allocated": lambda *_: 0,
    "max_memory_reserved": lambda *_: 0,
    "mem_get_info": lambda *_: (_GIB, _GIB),
    "get_device_name": lambda *_: "cpu",
    "manual_seed": torch.manual_seed,
    "manual_seed_all": torch.manual_seed,
}


class _NoAutocast(torch.autocast):
    """Computes in float32: both have bfloat16 written in, which is slower here and compares with nobody."""

    def __init__(self, device_type, dtype=None, enabled=True, cache_enabled=None):
        super().__init__(device_type, dtype=dtype, enabled=False, cache_enabled=cache_enabled)


def replace_devices(device_module) -> None:
    """Makes a framework compute on CPUs, over gloo; `device_module` is where it asks what there is."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    for name, function in _MEMORY.items():
        if not hasattr(torch.cpu, name) or name in ("empty_cache", "set_device"):
            setattr(torch.cpu, name, function)
    torch.autocast = _NoAutocast
    device_module.get_nccl_backend = lambda: "gloo"
    device_module.get_device_id = lambda: torch.device("cpu")
    init = dist.init_process_group
    dist.init_process_group = lambda backend=None, *args, **kwargs: init("gloo", *args, **kwargs)
    from_pretrained = AutoConfig.from_pretrained.__func__

    def without_flash(cls, *args, **kwargs):
        if kwargs.get("attn_implementation") == "flash_attention_2":
            kwargs["attn_implementation"] = "sdpa"
        return from_pretrained(cls, *args, **kwargs)

    AutoConfig.from_pretrained = classmethod(without_flash)
    sharded = torch.distributed.fsdp.FullyShardedDataParallel
    shard = sharded.__init__

    def on_cpu(self, *args, **kwargs):
        # Both need an accelerator; every rank reads the same file anyway.
        shard(self, *args, **kwargs | {"sync_module_states": False, "cpu_offload": None})

    sharded.__init__ = on_cpu
    if os.environ.get("PEER_NO_SYNC") == "1":
        # No all-reduce for every token under FSDP: all responses are equally long, and parameters are gathered before.
        transformers.generation.utils.is_fsdp_managed_module = lambda _: False
