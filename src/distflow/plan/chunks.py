"""Chunks: generating ranks send samples in fixed parts, so that other ranks start before the last sample is complete.

A chunk is a fixed part of every replica's prompts. Nodes that work sample by sample, or group by group, on other ranks
run once per chunk; all other nodes see the whole step. Flow and placement determine these nodes. Chunks are independent
of each other, so their tasks, listed one after the other, may run in any order that all ranks share.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from distflow.errors import PlacementError
from distflow.flow.graph import SOURCE, Flow, Node
from distflow.plan.tasks import Load, Merge, Move, Partition, RunNode, Split, SyncWeights, Task

_KEY = "rollout.chunk"


def check_chunk(prompts: int, chunk: int, replicas: int) -> int:
    """Returns the number of chunks of a step. Raises unless every replica has the same number of prompts in each."""
    if prompts % chunk or chunk % replicas:
        fits = [str(c) for c in range(replicas, prompts + 1, replicas) if prompts % c == 0]
        way_out = f"use one of {', '.join(fits)}" if fits else f"make data.batch a multiple of {replicas}"
        raise PlacementError(
            f"{_KEY}: chunks of {chunk} do not divide the {prompts} prompts of a step, and each of them evenly over the"
            f" {replicas} replicas that generate; {way_out}"
        )
    return prompts // chunk


def in_chunks(
    tasks: Sequence[Task], flow: Flow, home: Mapping[str, Partition], chunk: int, prompts: int, repeat: int
) -> list[Task]:
    """Returns the tasks of a step, where the tasks that can run by chunk follow generation, once per chunk."""
    generates = [n for n in flow.nodes if n.generates]
    if len(generates) != 1 or home[generates[0].id] is not home[SOURCE]:
        raise PlacementError(
            f"{_KEY}: there must be one node that generates, on the ranks where its prompts are loaded; leave it out"
        )
    whole = home[generates[0].id]
    count = check_chunk(prompts, chunk, whole.layout.dp)
    chunked = _chunked_nodes(tasks, flow, home, whole, chunk, repeat)
    if not chunked:
        raise PlacementError(
            f"{_KEY}: no node runs chunk by chunk: it would have to work sample by sample on what"
            f" '{generates[0].id}' writes, on other ranks, whose replicas divide a chunk evenly; leave it out"
        )
    partitions = {home[n].id for n in chunked}
    early = [t for t in tasks if _is_early(t, chunked, partitions, whole, flow)]
    at = next(i for i, t in enumerate(tasks) if isinstance(t, RunNode) and t.node == generates[0].id) + 1
    out = list(tasks[:at])
    sent = dict.fromkeys(f for t in early if isinstance(t, Move) and t.src is whole for f in t.fields)
    readers = sorted({r for n in chunked for r in home[n].layout.ranks})
    out.append(Split(whole, tuple(_part(whole, i, count) for i in range(count)), tuple(sent), tuple(readers)))
    for i in range(count):
        out += [_of_chunk(t, i, count) for t in early]
    late = [t for t in tasks[at:] if not any(t is e for e in early)]
    merged = {p.id: replace(p, uneven=True) for p in home.values() if p.id in partitions}
    for p in merged.values():
        fields = dict.fromkeys(f for t in late for q, f in t.touches() if q.id == p.id)
        present = {f for t in early for q, f in t.touches() if q.id == p.id}
        all_fields = tuple(f for f in dict.fromkeys(f for t in early for q, f in t.touches() if q.id == p.id))
        kept = tuple(f for f in fields if f in present)
        out.append(Merge(tuple(_part(p, i, count) for i in range(count)), p, all_fields, kept))
    return out + [_with_partitions(t, merged) for t in late]


def _chunked_nodes(
    tasks: Sequence[Task], flow: Flow, home: Mapping[str, Partition], whole: Partition, chunk: int, repeat: int
) -> set[str]:
    """Returns the nodes that run chunk by chunk."""
    chunked: set[str] = set()
    for n in flow.order:
        inputs = {flow.writer[f] for f in n.reads} | set(n.after)
        known = {SOURCE, *(m.id for m in flow.nodes if m.generates)}
        if (
            _works_by_sample(n)
            and inputs <= known | chunked
            and not inputs <= {SOURCE}
            and _fits(home[n.id], whole, chunk, repeat)
        ):
            chunked.add(n.id)
    while True:  # all moves to such a node must go chunk by chunk, too
        partitions = {home[n].id for n in chunked}
        broken = set[str]()
        for t in tasks:
            if isinstance(t, Move) and t.dst.id in partitions and not _is_early(t, chunked, partitions, whole, flow):
                broken |= {n for n in chunked if home[n] is t.dst and set(flow.node(n).reads) & set(t.fields)}
                if t.assigns:
                    broken |= {n for n in chunked if home[n] is t.dst}
        broken |= {n for n in chunked - broken if {flow.writer[f] for f in flow.node(n).reads} & broken}
        if not broken:
            return chunked
        chunked -= broken


def _works_by_sample(n: Node) -> bool:
    return n.type != "train" and not (n.whole_batch or n.balance or n.dynamic_sampling or n.generates)


def _fits(p: Partition, whole: Partition, chunk: int, repeat: int) -> bool:
    """Returns whether a partition is on other ranks than generation, and divides a chunk evenly."""
    units = chunk if p.whole_groups else chunk * repeat
    return not set(p.layout.ranks) & set(whole.layout.ranks) and units % p.layout.dp == 0


def _is_early(t: Task, chunked: set[str], partitions: set[str], whole: Partition, flow: Flow) -> bool:
    match t:
        case RunNode():
            return t.node in chunked
        case Move():
            known = {SOURCE, *chunked, *(n.id for n in flow.nodes if n.generates)}
            inside = t.dst.id in partitions and (t.src is whole or t.src.id in partitions)
            return inside and {flow.writer[f] for f in t.fields} <= known
        case _:
            return False


def _part(p: Partition, i: int, count: int) -> Partition:
    return replace(p, id=f"{p.id}#{i}", chunk=(i, count))


def _of_chunk(t: Task, i: int, count: int) -> Task:
    if isinstance(t, Move):
        src, dst = _part(t.src, i, count), _part(t.dst, i, count)
        return replace(t, id=f"{t.id}#{i}", src=src, dst=dst, expected_bytes=t.expected_bytes // count)
    assert isinstance(t, RunNode)
    return replace(t, partition=_part(t.partition, i, count))


def _with_partitions(t: Task, merged: Mapping[str, Partition]) -> Task:
    """Returns a task of the whole step, with uneven partitions where chunks were merged."""
    if isinstance(t, Move):
        return replace(t, src=merged.get(t.src.id, t.src), dst=merged.get(t.dst.id, t.dst))
    if isinstance(t, RunNode | Load):
        return replace(t, partition=merged.get(t.partition.id, t.partition))
    assert isinstance(t, SyncWeights)
    return t
