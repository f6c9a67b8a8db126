"""Random flows, placements and ragged data; every node checks, sample by sample, the fields it reads."""

import math
import random
from functools import cache
from typing import Any

import numpy as np
import torch

from distflow.batch.batch import Batch, Column, Ragged
from distflow.batch.context import Context
from distflow.dataset.shuffle import permute
from distflow.flow import Flow, Node
from distflow.plan import Place, Placement, Plan, Workload, plan

KINDS = (
    "float",
    "bits",
    "bf16 matrix",
    "tokens",
    "rows",
    "bytes",
    "complex",
    "text",
    "image",
    "maybe text",
    "score",
    "count",
    "flag",
)


@cache
def value(name: str, sample: int) -> Any:
    """Returns field `name` of a sample: a function of both, so that every reader can check it. Names end in a kind."""
    rng = np.random.default_rng([sample, *name.encode()])
    # Heavy-tailed lengths, empty ones included.
    length = 0 if rng.random() < 0.1 else int(min(rng.lognormal(1.5, 1.0), 200))
    match name.partition(".")[2].replace("_", " "):
        case "float":
            return torch.tensor(rng.standard_normal(), dtype=torch.float32)
        case "bits":
            return torch.from_numpy(rng.integers(0, 2, 3).astype(bool))
        case "bf16 matrix":
            return torch.from_numpy(rng.standard_normal((2, 3))).bfloat16()
        case "tokens":
            return torch.from_numpy(rng.integers(0, 1 << 40, length))
        case "rows":
            return torch.from_numpy(rng.standard_normal((length, 2)).astype(np.float32))
        case "bytes":
            return torch.from_numpy(rng.integers(0, 256, length).astype(np.uint8))
        case "complex":
            return torch.from_numpy(rng.standard_normal(length) + 1j * rng.standard_normal(length))
        case "text":
            return "".join(chr(int(c)) for c in rng.choice([65, 228, 0x2028, 0x1F600, 10, 34], length))
        case "image":
            return {"path": f"images/{sample}.png", "size": [int(rng.integers(1, 9)), 2.5], "alt": None}
        case "score":
            return float(rng.standard_normal()) if rng.random() < 0.9 else math.nan
        case "count":
            return int(rng.integers(0, 100)) * 10 ** (30 if rng.random() < 0.02 else 1)
        case "flag":
            return bool(rng.random() < 0.5)
        case "maybe text":
            return f"sample {sample}" if rng.random() < 0.5 else None
    raise AssertionError(name)


def column(name: str, ids: np.ndarray) -> Column:
    rows = [value(name, int(i)) for i in ids]
    kind = name.partition(".")[2]
    if kind in ("tokens", "rows", "bytes", "complex"):
        return Ragged.of(rows)
    return torch.stack(rows) if isinstance(rows[0], torch.Tensor) else rows


def same(a: Any, b: Any) -> bool:
    if isinstance(b, torch.Tensor):
        return isinstance(a, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, torch.Tensor) and type(b) is float:  # a list of floats that a node has written
        return torch.equal(a, torch.tensor(b)) or (math.isnan(a) and math.isnan(b))
    return type(a) is type(b) and (a == b or (a != a and b != b))


def check_and_write(
    batch: Batch,
    ctx: Context,
    node: str,
    writes: list[str],
    whole: bool,
    repeat: int,
    chosen: list[list[int]] | None = None,
) -> dict[str, Column]:
    """The function of every node of a random flow. `chosen`: the prompts of each step after a resample."""
    assert len(batch) > 0  # a function is not called for no samples
    if chosen:
        assert ctx.groups.tolist() == chosen[ctx.step - 1]
        assert set(batch.groups.tolist()) <= set(chosen[ctx.step - 1])
    assert list(batch.ids) == sorted(set(batch.ids.tolist()))
    assert (batch.groups == batch.ids // repeat).all()
    for name, col in batch.columns.items():
        assert len(col) == len(batch), name
        for got, sample in zip(col, batch.ids, strict=True):
            want = expected(name, int(sample), repeat)
            assert same(got, want), f"rank {ctx.rank}, {node}: field {name} of sample {sample}: {got!r} is not {want!r}"
    if whole:
        _, counts = np.unique(batch.groups, return_counts=True)
        assert (counts == repeat).all(), f"{node}: groups are split"
    ctx.metrics.log(f"samples/{node}", len(batch), reduce="sum")  # of all replicas of a sample, one counts
    ctx.metrics.log(f"replicas/{node}", 1.0, len(batch))  # and here each
    return {w: column(w, batch.ids) for w in writes}


ROWS = 61  # fewer than a step may take, so that steps run over the end of an epoch


class Source:
    """A data set of a few rows; `expected` checks what the loader makes of them."""

    column_names: tuple[str, ...] = ("d0.text", "d1.image", "d2.maybe_text")

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {name: value(name, i) for name in self.column_names}


@cache
def expected(name: str, sample: int, repeat: int) -> Any:
    """Returns what a reader must get: data columns follow the order of the stream, others depend on the sample."""
    if name not in Source.column_names:
        return value(name, sample)
    epoch, at = divmod(sample // repeat, ROWS)
    return value(name, int(permute(np.array([at]), ROWS, 0, epoch)[0]))


def chosen_prompts(flag: str, repeat: int, wanted: int, rounds: int, steps: int) -> list[list[int]]:
    """Returns the prompts of each step after its resample, computed one prompt after the other."""
    chosen, position = [], 0
    for _ in range(steps):
        good: list[int] = []
        others: list[int] = []
        at = position
        while len(good) < wanted and at < position + wanted * rounds:
            keep = all(value(flag, at * repeat + j) for j in range(repeat))
            (good if keep else others).append(at)
            at += 1
        chosen.append(sorted(good + others[: wanted - len(good)]))
        position = at
    return chosen


def random_plan(rng: random.Random, workers: int) -> Plan:
    """Fan-out, joins, diamonds; overlapping and disjoint rank sets; layouts that change from node to node."""
    nodes: list[Node] = []
    fields: list[str] = list(Source.column_names)
    repeat = rng.choice([1, 1, 2, 3])
    count = rng.randint(1, 8)
    resamples = rng.randrange(count) if rng.random() < 0.25 else None
    for i in range(count):
        reads = tuple(rng.sample(fields, rng.randint(0, min(4, len(fields)))))
        writes = tuple(f"f{i}{j}.{rng.choice(KINDS).replace(' ', '_')}" for j in range(rng.randint(0, 3)))
        resample = rng.randint(1, 4) if i == resamples else 0
        if resample:
            writes = (f"f{i}0.flag",)
        whole = rng.random() < 0.25
        nodes.append(
            Node(
                id=f"n{i}",
                reads=reads,
                writes=writes,
                after=(f"n{rng.randrange(i)}",) if i and rng.random() < 0.2 else (),
                whole_groups=whole,
                whole_batch=rng.random() < 0.1,
                type=rng.choice(["compute", "inference"]),  # a model gets even shares
                sequence_parallel=rng.random() < 0.3,
                balance=rng.choice(reads) if reads and rng.random() < 0.3 else None,
                params={"node": f"n{i}", "writes": list(writes), "whole": whole, "repeat": repeat},
                dynamic_sampling=resample,
                fn=check_and_write,
            )
        )
        fields += writes
    rank_sets = {}
    for k in range(rng.randint(1, 3)):
        ranks = sorted(rng.sample(range(workers), rng.randint(1, workers)))
        if rng.random() < 0.3:
            rng.shuffle(ranks)
        rank_sets[f"r{k}"] = ",".join(map(str, ranks))
    sizes = {name: len(t.split(",")) for name, t in rank_sets.items()} | {"all": workers}

    def place(sequence_parallel: bool) -> Place:
        name = rng.choice(list(sizes))
        tp = rng.choice([t for t in range(1, sizes[name] + 1) if sizes[name] % t == 0])
        rest = sizes[name] // tp
        sp = rng.choice([s for s in range(1, rest + 1) if rest % s == 0]) if sequence_parallel else 1
        return Place(name, tp=tp, sp=sp)

    cut = {n.id: n.sequence_parallel for n in nodes} | {"data": False}
    places = {i: place(divides) for i, divides in cut.items() if rng.random() < 0.8}
    default = place(True)
    replicas = [sizes[p.ranks] // p.tp for p in (*places.values(), default)]  # or fewer, if some divide sequences
    # Often a number that divides evenly; otherwise any, which may leave replicas without samples.
    prompts = math.lcm(*replicas) * rng.randint(1, 2) if rng.random() < 0.5 else rng.randint(1, 2 * max(replicas))
    flow = Flow("random", Source.column_names, tuple(nodes))
    if flow.sampling_node:
        chosen = chosen_prompts(flow.sampling_node.writes[0], repeat, prompts, flow.sampling_node.dynamic_sampling, 2)
        for n in nodes:
            if n.id not in flow.sampling_loop:
                n.params["chosen"] = chosen  # type: ignore[index]
    return plan(flow, Placement(workers, rank_sets, default, nodes=places), Workload(prompts, repeat))
