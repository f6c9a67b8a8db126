"""A device that is not the CPU, for machines without a GPU: its numbers are real, and it refuses CPU tensors.

Its tensors lie in host memory, but torch knows them as tensors of the `PrivateUse1` backend. Every operation comes to
`_dispatch`, which checks the devices of its arguments as CUDA's kernels do, and then calls the CPU's kernel on the same
memory: results can be compared with those of the CPU. Nothing is compiled. It has streams and events, and `races`
watches what they do with memory.

Once `device` was called, torch has an accelerator until the process ends: call it in a process of its own.
"""

import ctypes
import functools
import sys
import threading
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch.distributed.fsdp._fully_shard import _fsdp_init, _fsdp_param, _fsdp_param_group
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from accelerator import flash, graphs, races
from distflow.train import offload
from distflow.util import copies

NAME = "rehearsal"
MEMORY = 4 << 30  # bytes it claims to have
WAIT = "wait"
calls: Counter[str] = Counter()  # of each operation; WAIT counts how often the host had to wait for the device

_CPU, _OTHER = 1, 12  # DLPack's kDLCPU and kDLExtDev
_CPU_KEY = DispatchKeySet(DispatchKey.CPU)
_libraries: list[torch.library.Library] = []  # kernels are unregistered when their library is collected


class MixedDevicesError(RuntimeError):
    """Something that a device of its own would not do, or do wrong: above all, tensors of two devices together."""


@cache
def device() -> torch.device:
    """Registers the device with torch and returns it."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    every_operation = torch.library.Library("_", "IMPL")
    every_operation.fallback(_dispatch, "PrivateUse1")
    aten = torch.library.Library("aten", "IMPL")
    for name, kernel in _KERNELS.items():
        aten.impl(name, kernel, "PrivateUse1")
    for name in ("as_strided", "view", "_reshape_alias"):
        aten.impl(name, _view_kernel(getattr(torch.ops.aten, name).default), "PrivateUse1")
    # gloo runs the collectives that would go to the device's own backend, on the same memory.
    dist.Backend.default_device_backend_map[NAME] = "gloo"
    c10d = torch.library.Library("c10d", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # these kernels replace others
        for name in _COLLECTIVES:
            c10d.impl(name, functools.partial(_collective, getattr(torch.ops.c10d, name).default), "PrivateUse1")
    _libraries.extend((every_operation, aten, c10d))
    fsdp: list[Any] = [_fsdp_init, _fsdp_param, _fsdp_param_group]
    fsdp[0]._move_states_to_device = _move_states  # `tensor.data = …` works for CUDA, but not for this backend
    fsdp[1].free_storage = _poison  # borrowed memory can be neither freed nor allocated again
    fsdp[1].alloc_storage = fsdp[2].alloc_storage = races.filled
    offload.free, offload.allocate = _poison, lambda tensor, size: races.filled(tensor)
    copies.empty_pinned = races.empty_pinned
    _wait_for_nccl()
    # There is no allocator to ask.
    torch.accelerator.get_memory_info = lambda device=None: (MEMORY, MEMORY)
    torch.accelerator.max_memory_allocated = lambda device=None: races.Held.most
    torch.accelerator.reset_peak_memory_stats = races.Held.count_anew
    return torch.device(NAME, 0)


class _ManagedTensor(ctypes.Structure):
    """The first fields of DLPack's DLManagedTensor."""

    _fields_ = (("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32))


_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


def _as(tensor: Tensor, device_type: int) -> Tensor:
    """Returns the same memory as a tensor of another device."""
    lib: Any = torch._C
    capsule = lib._to_dlpack(tensor.detach() if tensor.requires_grad else tensor)
    managed = ctypes.cast(_pointer(capsule, b"dltensor"), ctypes.POINTER(_ManagedTensor)).contents
    managed.device_type, managed.device_id = device_type, 0
    result: Tensor = lib._from_dlpack(capsule)
    return result


def _own(tensor: Tensor) -> Tensor:
    """Returns memory of the CPU as a tensor of the device."""
    _check_thread()
    return _as(races.allocated(tensor, _stream()), _OTHER)


def _refuse(message: str) -> NoReturn:
    """Raises an error; in the thread of a backward pass prints it first, where it might end the process."""
    if threading.current_thread() is not threading.main_thread():
        traceback.print_stack()
        print(message, file=sys.stderr, flush=True)
    raise MixedDevicesError(message)


def _dispatch(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs an operation that has no kernel of its own in `_KERNELS`: the CPU's kernel, on the same memory."""
    name = op.name()

    def operation() -> Any:
        calls[name] += 1
        _launch(name, *_accesses(op, args, kwargs))
        if name in _WAITING:
            _host_waits()
        return _run(op, args, kwargs)

    return graphs.record(operation, all(r.alias_info is None for r in op._schema.returns))


def _run(op: Any, args: Any, kwargs: Any) -> Any:
    name = op.name()
    indices = args[1] if name.startswith(_INDEXING) else ()  # CUDA takes them from the CPU
    borrowed: list[tuple[Tensor, Tensor]] = []  # a tensor of the device, and the one that the kernel gets for it

    def borrow(tensor: Tensor) -> Tensor:
        if tensor.device.type == NAME:
            # The kernel may resize an empty one, which it cannot do with borrowed memory.
            cpu = _as(tensor, _CPU) if tensor.numel() else torch.empty_like(tensor, device="cpu")
            borrowed.append((tensor, cpu))
            return cpu
        if tensor.is_cpu and not any(tensor is i for i in indices) and not _is_scalar(op, tensor):
            _refuse(f"{name}: expected all tensors to be on {NAME}, but one, {list(tensor.shape)}, is on the CPU")
        return tensor

    args, kwargs = tree_map_only(Tensor, borrow, (args, kwargs))
    if "device" in kwargs:
        kwargs["device"] = torch.device("cpu")
    result = op(*_scalars_as_tensors(op, args), **kwargs)
    for ours, cpu in borrowed:
        if ours.shape != cpu.shape:
            _set_memory(ours, _own(cpu))

    def give_back(tensor: Tensor) -> Tensor:
        for ours, cpu in borrowed:
            if tensor is cpu:
                return ours
        if borrowed and _returns_view(op):
            base = borrowed[0][0]
            return base.as_strided(tensor.shape, tensor.stride(), base.storage_offset() + tensor.storage_offset())
        return _own(tensor)

    return tree_map_only(Tensor, give_back, result)


def _launch(name: str, reads: list[Tensor], writes: list[Tensor], stream: races.Stream | None = None) -> None:
    """Notes an operation in the thread's stream, or in another one."""
    _check_thread()
    races.launch(stream or _stream(), name, reads, writes)


def _host_waits() -> None:
    """Lets the host wait for this thread's stream."""
    if graphs.Graph.recording:
        _refuse("the host waits while a graph is recorded")
    calls[WAIT] += 1
    races.host_waits(_stream().now())


def _accesses(op: Any, args: Any, kwargs: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Returns which of the device's tensors an operation reads, and which it writes."""
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    if op.name().startswith(_READING_NOTHING) or _returns_view(op):
        return reads, writes
    for argument, value in _given(op, args, kwargs):
        into = writes if argument.alias_info is not None and argument.alias_info.is_write else reads
        into += _tensors_of(value)
    return reads, writes


def _given(op: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
    by_name = {argument.name: argument for argument in op._schema.arguments}
    yield from zip(op._schema.arguments, args, strict=False)
    yield from ((by_name[name], value) for name, value in kwargs.items())


def _tensors_of(value: Any) -> list[Tensor]:
    return [t for t in tree_leaves(value) if isinstance(t, Tensor) and t.device.type == NAME]


_READING_NOTHING = (
    "aten::empty_like", "aten::zeros_like", "aten::ones_like", "aten::full_like", "aten::rand_like", "aten::new_",
    "aten::is_same_size",
)  # fmt: skip
_INDEXING = ("aten::index.", "aten::index_put", "aten::_index_put_impl_", "aten::_unsafe_index")
_WAITING = ("aten::equal", "aten::is_nonzero", "aten::nonzero", "aten::masked_select", "aten::_unique2")


def _is_scalar(op: Any, tensor: Tensor) -> bool:
    """Whether it is a number that CUDA takes from the CPU: in an element-wise operation, or as a value to index-put."""
    return tensor.dim() == 0 and (torch.Tag.pointwise in op.tags or op.name().startswith(_INDEXING))


def _scalars_as_tensors(op: Any, args: Any) -> list[Any]:
    """Converts numbers back to tensors where the kernel wants tensors; the dispatcher has unwrapped them."""
    return [
        torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
        if is_tensor and isinstance(value, bool | int | float)
        else value
        for is_tensor, value in zip(_takes_tensors(op), args, strict=False)
    ]


@cache
def _takes_tensors(op: Any) -> list[bool]:
    return [str(a.type) == "Tensor" for a in op._schema.arguments]


@cache
def _returns_view(op: Any) -> bool:
    return any(r.alias_info is not None and not r.alias_info.is_write for r in op._schema.returns)


_COLLECTIVES = (
    "allreduce_", "broadcast_", "_allgather_base_", "_reduce_scatter_base_", "allgather_", "alltoall_base_", "send",
    "recv_",
)  # fmt: skip


_joined: set[str] = set()  # names of process groups that have done a collective: now its ranks have a communicator


def _collective(op: Any, *args: Any) -> Any:
    for arg in args:
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg):
            process_group = dist.ProcessGroup.unbox(arg)
            if NAME not in [d.type for d in process_group._device_types]:
                _refuse(f"{op.name()}: the process group is not for {NAME}, but a tensor is on it")
            if not op.name().startswith(("c10d::send", "c10d::recv_")):
                _joined.add(process_group.group_name)
            elif process_group.group_name not in _joined:  # NCCL hangs, unless by chance all ranks send or receive
                _refuse(f"{op.name()}: the first operation of a process group has to be one of all its ranks")
    given = {argument.name: value for argument, value in _given(op, args, {})}
    sends = op.name().startswith("c10d::send")
    writes, reads = ([], args[0]) if sends else (_tensors_of(args[0]), _tensors_of(args[1:]))
    if sends or op.name().startswith("c10d::recv_") or given.get("async_op", given.get("asyncOp")):
        nccl = _nccl_streams.setdefault(_stream(), races.Stream(f"NCCL's for {_stream().name}"))
        nccl.join(_stream().now())
        _launch(op.name(), list(reads), list(writes), nccl)
    else:
        _launch(op.name(), list(reads), list(writes))
    calls[op.name()] += 1
    return _run(op, args, {})


# What a collective that is not waited for at once runs in, for each stream that asks for it. NCCL has one for each
# process group: what is in order here may not be so there, if a stream waits for one work and not for another.
_nccl_streams: dict[races.Stream, races.Stream] = {}


def _wait_for_nccl() -> None:
    """Lets a stream that waits for a work go on behind it."""
    work: Any = dist.Work
    wait = work.wait

    def wait_in_stream(self: Any, *args: Any) -> Any:
        if nccl := _nccl_streams.get(_stream()):
            _stream().join(nccl.now())
        return wait(self, *args)

    work.wait = wait_in_stream


def _view_kernel(op: Any) -> Any:
    """Returns the CPU's kernel of an operation that only views memory, whichever device it belongs to."""
    return lambda *args, **kwargs: op.redispatch(_CPU_KEY, *args, **kwargs)


def _empty(size: Any, *, dtype: Any = None, memory_format: Any = None, **_: Any) -> Tensor:
    memory_format = memory_format or torch.contiguous_format
    return _own(torch.empty(size, dtype=dtype, device="cpu", memory_format=memory_format))


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> Tensor:
    return _own(torch.empty_strided(size, stride, dtype=dtype, device="cpu"))


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """Copies between devices: the one kernel that takes tensors of two. The host waits, unless its memory is pinned."""
    if graphs.Graph.recording and (source.is_cpu or target.is_cpu):
        _refuse("host memory is copied while a graph is recorded: replays would copy what is there then")
    return graphs.record(lambda: _copy(source, target, non_blocking), fresh=False)


def _copy(source: Tensor, target: Tensor, non_blocking: bool) -> Tensor:
    _launch("a copy", _tensors_of(source), _tensors_of(target))
    host = target if target.is_cpu else source
    later = non_blocking and host.is_cpu and races.is_pinned(host) and host.numel() > 0
    to, by = (t if t.is_cpu else _as(t, _CPU) for t in (target, source))
    if source.is_cpu:
        races.read_by_device(source, _stream())
    if target.is_cpu and later:
        races.to_host(by, target, _stream())
        return target
    to.copy_(by)
    if host.is_cpu and later:
        races.from_host(source, _stream())
    elif host.is_cpu:
        _host_waits()
    return target


def _item(tensor: Tensor) -> Any:
    _launch("item()", [tensor], [])
    _host_waits()
    return torch.ops.aten._local_scalar_dense(_as(tensor, _CPU))


def _set_memory(tensor: Tensor, other: Tensor) -> Tensor:
    """Makes the memory of `other` that of `tensor`."""
    op = torch.ops.aten.set_.source_Storage_storage_offset
    result: Tensor = op.redispatch(_CPU_KEY, tensor, other.untyped_storage(), 0, other.shape, other.stride())
    return result


def _resize(tensor: Tensor, size: Any, **_: Any) -> Tensor:
    if tuple(size) == tuple(tensor.shape):
        return tensor
    return _set_memory(tensor, torch.empty(size, dtype=tensor.dtype, device=tensor.device))


_KERNELS = {
    "empty.memory_format": _empty,
    "empty_strided": _empty_strided,
    "_copy_from": _copy_from,
    "_copy_from_and_resize": _copy_from,
    "_local_scalar_dense": _item,
    "resize_": _resize,
    "_fused_sdp_choice": lambda *args, **kwargs: 0,  # the math kernel; torch has no fused ones for this device
}


def _flash_kernel(name: str, kernel: Any) -> Any:
    """Returns a kernel of flash attention that works on the memory of its arguments."""

    def call(*given: Any, **options: Any) -> Any:
        def operation() -> Any:
            calls[f"aten::{name}"] += 1
            _launch(name, _tensors_of((given, options)), [])
            args, kwargs = tree_map_only(Tensor, _borrow, (given, options))
            return tree_map_only(Tensor, _own, kernel(*args, **kwargs))

        return graphs.record(operation, fresh=True)

    return call


def _borrow(tensor: Tensor) -> Tensor:
    if tensor.is_cpu:
        _refuse(f"flash attention: one of its tensors, {list(tensor.shape)}, is on the CPU")
    return _as(tensor, _CPU)


def _multiply(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    calls["aten::mm.dtype"] += 1
    _launch("aten::mm", [a, b], [])
    return _own(_borrow(a).to(dtype) @ _borrow(b).to(dtype))


def _norm(*given: Any) -> Any:
    return graphs.record(lambda: _normed(*given), fresh=True)


def _normed(x: Tensor, shape: list[int], weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    calls["aten::_fused_rms_norm"] += 1
    _launch("aten::_fused_rms_norm", [x, weight], [])
    x, weight = _borrow(x), _borrow(weight)
    inverse = (x.float().square().mean(-1, keepdim=True) + epsilon).rsqrt()
    return _own((x.float() * inverse * weight.float()).to(x.dtype)), _own(inverse)


_KERNELS |= {"mm.dtype": _multiply, "_fused_rms_norm": _norm}
_KERNELS |= {name: _flash_kernel(name, kernel) for name, kernel in flash.KERNELS.items()}


def _move_states(params: list[Tensor], buffers: list[Tensor], to: torch.device) -> None:
    for tensor in (*params, *buffers):
        if tensor.is_cpu:
            torch.utils.swap_tensors(tensor, tensor.to(to))


def _poison(tensor: Tensor) -> None:
    """Stands in for freeing: whoever still reads the tensor reads NaN."""
    races.emptied(tensor)
    _as(tensor, _CPU).fill_(torch.nan)


class _Stream(races.Stream):
    """A stream, as torch.cuda has it."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    @property
    def device(self) -> torch.device:
        return torch.device(NAME, 0)

    def wait_stream(self, stream: races.Stream) -> None:
        self.join(stream.now())

    def wait_event(self, event: "_Event") -> None:
        self.join(event.clock)

    def record_event(self, event: "_Event | None" = None) -> "_Event":
        event = event or _Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        calls[WAIT] += 1
        races.host_waits(self.now())


class _Event:
    def __init__(self, *_: Any, **__: Any) -> None:
        self.clock: races.Clock = {}

    def record(self, stream: _Stream | None = None) -> None:
        self.clock = (stream or _stream()).now()

    def wait(self, stream: _Stream | None = None) -> None:
        (stream or _stream()).join(self.clock)

    def synchronize(self) -> None:
        calls[WAIT] += 1
        races.host_waits(self.clock)


class _Current(threading.local):
    """What the CUDA runtime knows of a thread."""

    device: int | None = None  # not set: the first one, which is that of another worker
    stream: _Stream | None = None


_current, _main_stream = _Current(), _Stream()


def _stream() -> _Stream:
    return _current.stream or _main_stream


def _check_thread() -> None:
    """Refuses an operation of a thread that has not said on which device, or is in the main thread's stream."""
    thread = threading.current_thread()
    if thread is threading.main_thread() or isinstance(thread, threading._DummyThread):  # of a backward pass
        return
    if _current.device is None:
        _refuse(f"thread '{thread.name}' uses a device and has not set it: it would use that of local rank 0")
    if _current.stream is None:
        _refuse(f"thread '{thread.name}' uses the main thread's stream: each waits for what the other began")


class _Module:
    """What `torch.cuda` is for CUDA. Each process sees one device, as if it were its own."""

    Stream, Event = _Stream, _Event
    CUDAGraph, graph = graphs.Graph, staticmethod(graphs.recorded)

    def _yes(self, *_: Any) -> bool:
        return True

    is_initialized = is_available = _yes

    def _is_in_bad_fork(self) -> bool:
        return False

    def _first(self, *_: Any) -> int:
        return 0

    current_device = _first

    def device_count(self) -> int:
        return 1

    def _nothing(self, *_: Any, **__: Any) -> None:
        return None

    manual_seed_all = empty_cache = _nothing

    def synchronize(self, *_: Any) -> None:
        calls[WAIT] += 1
        races.host_waits(races.begun)

    def set_device(self, *_: Any) -> None:
        _current.device = 0

    @contextmanager
    def stream(self, stream: _Stream | None) -> Iterator[None]:
        before, _current.stream = _current.stream, stream or _current.stream
        try:
            yield
        finally:
            _current.stream = before

    def device(self, *_: Any) -> Any:
        return nullcontext()

    def current_stream(self, *_: Any) -> _Stream:
        return _stream()

    def get_rng_state(self, *_: Any) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, *_: Any) -> None:
        torch.set_rng_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]
