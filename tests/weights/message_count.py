"""Counts what one rank of a weight sync does, on tensors without memory."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from distflow.plan import Layout
from distflow.plan.topology import Topology
from distflow.weights.shards import Shards, TensorSpec
from distflow.weights.sync import WeightSync

META = torch.device("meta")
PER_HOST = 8


def qwen(hidden: int, kv_heads: int, intermediate: int, layers: int) -> list[TensorSpec]:
    """Returns the parameters of a Qwen2.5 model: heads of 128, biases of q, k and v, untied embeddings."""
    specs = [
        TensorSpec("embed", (152_064, hidden)),
        TensorSpec("norm", (hidden,)),
        TensorSpec("lm_head", (152_064, hidden)),
    ]
    for i in range(layers):
        for name, rows in (("q", hidden), ("k", 128 * kv_heads), ("v", 128 * kv_heads)):
            specs += [TensorSpec(f"{i}.{name}", (rows, hidden), 0), TensorSpec(f"{i}.{name}.bias", (rows,), 0)]
        specs += [TensorSpec(f"{i}.{name}", (intermediate, hidden), 0) for name in ("gate", "up")]
        specs += [TensorSpec(f"{i}.o", (hidden, hidden), 1), TensorSpec(f"{i}.down", (hidden, intermediate), 1)]
        specs += [TensorSpec(f"{i}.{name}", (hidden,)) for name in ("norm1", "norm2")]
    return specs


SPECS = {
    "0.5B": qwen(896, 2, 4864, 24),
    "7B": qwen(3584, 4, 18_944, 28),
    "72B": qwen(8192, 8, 29_568, 80),
}


def count(specs: Sequence[TensorSpec], workers: int, tp: int, rank: int = 0) -> Counter[str]:
    """Counts groups, messages, bytes and copies of a rank that trains with dp and generates with dp × tp."""
    ranks = tuple(range(workers))
    source, destination = Shards(Layout(ranks, workers), workers), Shards(Layout(ranks, workers // tp, tp), 1)
    topology = Topology(tuple(r // PER_HOST for r in ranks))
    transfer = WeightSync(specs, source, destination, rank, torch.bfloat16, topology, META)
    found = Counter({"buckets": len(transfer.buckets)})

    def parts(shards: Shards, dtype: torch.dtype) -> Mapping[str, Tensor]:
        boxes = {s.name: [hi - lo for lo, hi in shards.box(s, rank)] for s in specs}
        return {name: torch.empty(box, dtype=dtype, device=META) for name, box in boxes.items()}

    with _Copies(found):
        communication = transfer.run(parts(source, torch.float32), parts(destination, torch.bfloat16))
        for request in communication:  # it fills tensors without memory, so nothing is sent back
            found["groups"] += 1
            found["messages"] += len(request.send) + len(request.receive)
            found["sent bytes"] += sum(end - start for start, end in request.send.values())
            request.pack(torch.empty(request.size, dtype=torch.uint8, device=META))
            for peer, (start, end) in request.receive.items():
                if request.take:
                    request.take(peer, request.out[start:end])
    return found


class _Copies(TorchDispatchMode):
    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found["copies"] += op.overloadpacket.__name__ in ("copy_", "index_select")
        return op(*args, **(kwargs or {}))
