"""The bytes of a move between all ranks: the routes of `comm/routes.py`, for all ranks at once."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from distflow.comm.domains import Domain
from distflow.comm.routes import assign_replicas, contiguous_replicas
from distflow.config.model_shape import Floats
from distflow.plan.layout import Layout
from distflow.plan.tasks import Move, Partition
from distflow.util.arrays import Ints, position_in_run

_SCHEMA, _WORD = 8, 4  # a segment starts with 8 words of 4 bytes per field, and a length per field and sample


@dataclass(frozen=True)
class MoveTraffic:
    """Payload and wire bytes from each sender to each receiver; `kept` payload bytes stay on their rank."""

    sender: Ints
    receiver: Ints
    payload: Floats
    wire: Floats
    kept: Floats  # [ranks]


def new_replicas(domains: Sequence[Domain], old: Ints, weights: Floats, repeat: int) -> Ints:
    """Assigns the samples of each domain to the replicas of its target, as its workers do."""
    new = []
    for i, domain in enumerate(domains):
        src, dst = domain.move.src.layout, domain.move.dst
        slots = slice(domain.first, domain.first + domain.samples)
        group, balance = repeat if dst.whole_groups else 1, dst.balance is not None
        own = np.rint(weights[slots]).astype(np.int64)
        new.append(i * dst.layout.dp + assign_replicas(old[slots] - i * src.dp, src, dst.layout, own, group, balance))
    return np.concatenate(new)


def traffic(move: Move, old: Ints, new: Ints, size: Floats, workers: int) -> MoveTraffic:
    """Returns the bytes that each rank receives of the samples that it lacks; a replica's ranks send in turn."""
    src, dst = move.src.layout, move.dst.layout
    source_replicas, target_replicas = (_replica_table(layout) for layout in (src, dst))
    replica_of = np.full(workers, -1, np.int64)
    replica_of[list(src.ranks)] = np.repeat(np.arange(src.dp), src.replica_size)
    receiver = target_replicas[new]  # [samples, ranks of a replica]
    kept = replica_of[receiver] == old[:, None]
    sample = np.broadcast_to(np.arange(len(old))[:, None], receiver.shape)
    turn = np.broadcast_to(_turns(old, new, dst.dp)[:, None], receiver.shape)
    kept_bytes: Floats = np.bincount(receiver[kept], size[sample[kept]], workers).astype(np.float64)
    receiver, sample, turn = receiver[~kept], sample[~kept], turn[~kept]
    sender = source_replicas[old[sample], (turn + receiver) % src.replica_size]
    pair, inverse = np.unique(sender * workers + receiver, return_inverse=True)
    payload: Floats = np.bincount(inverse, size[sample], len(pair)).astype(np.float64)
    samples = np.bincount(inverse, minlength=len(pair))
    wire: Floats = payload + 1.0 * _WORD * len(move.fields) * (_SCHEMA + samples)
    return MoveTraffic(pair // workers, pair % workers, payload, wire, kept_bytes)


def header_bytes(move: Move, samples: int, repeat: int) -> int:
    """Returns the bytes that each rank contributes to the all-gather before a move."""
    words = 3 * _described(move.src, samples, repeat)
    return _WORD * (words if move.assigns else words + _described(move.dst, samples, repeat))


def contiguous(partition: Partition, samples: int, repeat: int) -> Ints:
    """Returns the replica of each sample if replicas have contiguous shares, of whole groups if required."""
    if partition.whole_groups:
        return np.repeat(contiguous_replicas(samples // repeat, partition.layout.dp), repeat)
    return contiguous_replicas(samples, partition.layout.dp)


def _described(partition: Partition, samples: int, repeat: int) -> int:
    """Returns the number of samples that each rank of a replica describes."""
    unit = repeat if partition.whole_groups else 1
    largest = -(-samples // unit // partition.layout.dp) * unit
    return math.ceil(largest / partition.layout.replica_size)


def _replica_table(layout: Layout) -> Ints:
    return np.asarray(layout.ranks, np.int64).reshape(layout.dp, layout.replica_size)


def _turns(old: Ints, new: Ints, replicas: int) -> Ints:
    """Returns the index of each sample among the samples with the same old and new replica."""
    key = old * replicas + new
    order = np.argsort(key, kind="stable")
    turns = np.empty_like(key)
    turns[order] = position_in_run(key[order])
    return turns
