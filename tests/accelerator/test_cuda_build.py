"""PyTorch's build for CUDA, on a machine without a driver: it has what the code asks of it, and takes our arguments.

`make test-cuda` runs this, in an environment of its own.
"""

import pkgutil
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch._subclasses.fake_tensor import FakeTensorMode

from accelerator.test_launches import micro_batch, shape_of
from backward import go_back
from distflow.device.process import ProcessSettings
from distflow.liveness.collectives import _DUMPS, _recorded
from distflow.model import varlen
from distflow.rehearsal.launches import DecodingStep, Launches, model_of
from distflow.rollout.builtin.decoding_graphs import can_record
from distflow.train.heads import LogprobHead

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.version.cuda is None, reason="this PyTorch is for CPUs: run `make test-cuda`"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the other tests of this folder run on the device"),
]

CUDA = torch.device("cuda", 0)
LAYERS = 2
ROOMS = (
    "checkpoint", "comm", "device", "first_hour", "liveness", "model", "rehearsal", "roles", "rollout.builtin", "run",
    "train", "weights",
)  # fmt: skip
EXTRAS = ("torchao",)
OPERATIONS = (
    "aten::_flash_attention_forward",
    "aten::_flash_attention_backward",
    "aten::_fused_rms_norm",
    "aten::mm.dtype",
    "aten::_fused_adamw_",
)


def test_it_is_for_the_driver_that_the_documentation_names() -> None:
    lib: Any = torch._C
    assert torch.version.cuda
    assert torch.version.cuda.startswith("13.")
    assert "sm_90" in lib._cuda_getArchFlags().split()


def test_what_runs_on_it_is_imported() -> None:
    for room in ROOMS:
        package = import_module(f"distflow.{room}")
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            if not module.ispkg and not module.name.endswith("__main__"):
                try:
                    import_module(module.name)
                except ModuleNotFoundError as e:
                    if e.name not in EXTRAS:
                        raise


@pytest.mark.parametrize("operation", OPERATIONS)
def test_it_has_the_kernels(operation: str) -> None:
    lib: Any = torch._C
    assert lib._dispatch_has_kernel_for_dispatch_key(operation, "CUDA")


def test_its_allocator_takes_what_is_chosen() -> None:
    ProcessSettings(expandable_segments=True, tf32=True).apply()
    lib: Any = torch._C
    with pytest.raises(ValueError, match="Unrecognized key"):
        lib._accelerator_setAllocatorSettings("expandable_segment:True")
    assert torch.backends.cuda.matmul.allow_tf32
    torch.set_float32_matmul_precision("highest")


def test_collectives_are_those_of_nccl_and_it_records_them() -> None:
    assert dist.is_nccl_available()
    assert dist.get_default_backend_for_device("cuda") == "nccl"
    assert all(hasattr(c10d, name) for name in _DUMPS)
    assert [_recorded(name) for name in _DUMPS] == [[], []]


def test_it_records_graphs() -> None:
    assert can_record(CUDA)


@pytest.fixture
def fake() -> Iterator[None]:
    """Tensors on CUDA that have no memory: torch checks the arguments of its operations for CUDA, and runs none."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


def test_a_micro_batch_is_trained_with_kernels_of_cuda(fake: None) -> None:
    assert varlen.has_kernel(CUDA, torch.bfloat16, 64)
    model = model_of(shape_of("0.5b").model_copy(update={"layers": LAYERS}), CUDA)
    with Launches() as launches:
        logprobs, entropy = LogprobHead(model)(PACKED.to(CUDA), 0.7)
        go_back((logprobs + entropy).sum())
    assert (logprobs.device, logprobs.dtype) == (CUDA, torch.float32)
    assert launches.kernels["torch_attn::_varlen_attn"] == 2 * LAYERS  # which count as two kernels each
    assert launches.kernels["torch_attn::_varlen_attn_backward"] == LAYERS
    assert launches.kernels["aten::mm"] > 0
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    torch.optim.AdamW(model.parameters(), fused=True).step()


def test_a_decoding_step_is_computed_with_kernels_of_cuda(fake: None) -> None:
    found = DecodingStep(shape_of("0.5b").model_copy(update={"layers": LAYERS}), 16, 600, CUDA).launches()
    assert found.kernels["aten::_flash_attention_forward"] == LAYERS
    assert found.kernels["aten::_fused_rms_norm"] == 2 * LAYERS + 1


PACKED = micro_batch(8, 4)
