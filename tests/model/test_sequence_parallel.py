"""Attention that ranks divide: the same as on one rank, whether or not they divide the heads."""

from collections.abc import Iterator
from contextlib import nullcontext
from itertools import product
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from distflow.cpu import attention as cpu_attention
from distflow.model.attention import AttentionParams, PackedAttention, SharedPrompts
from distflow.model.sequence_parallel import SequenceParallel
from spawn import spawn

HEADS = [(1, 1), (3, 1), (4, 2), (6, 2)]  # of queries, of keys
PARAMS = [AttentionParams(window=3), AttentionParams(softcap=2.0)]
DIM = 8


def packs() -> Iterator[PackedAttention]:
    yield PackedAttention([9, 5, 4])
    # Of three sequences, two begin with the first one's first four rows.
    rows = torch.tensor([*range(7), *range(4), 7, 8, 9, *range(4), 10])
    first = torch.tensor([0, 1, 2, 3, 4, 5, 6, 11, 12, 13, 18])
    yield PackedAttention([7, 7, 5], SharedPrompts(rows, first, torch.tensor([7, 8, 9, 10, 14, 15, 16, 17]), (7, 3, 1)))


def whole_and_divided(rank: int) -> list[tuple[float, float]]:
    """Returns the differences, of outputs and gradients, of all cases."""
    found = []
    for ranks in (4, 3):
        group = dist.new_group(list(range(ranks)))
        for kernel in (True, False) if rank < ranks else ():
            with nullcontext() if kernel else patch.object(cpu_attention, "has_kernel", lambda q: False):
                for (heads, keys), params, pack in product(HEADS, PARAMS, packs()):
                    found.append(differences(SequenceParallel.of(group), pack, heads, keys, params))
    return found


def differences(
    sequences: SequenceParallel, pack: PackedAttention, heads: int, keys: int, params: AttentionParams
) -> tuple[float, float]:
    count = sum(pack.shared.own if pack.shared else pack.lengths)
    noise = torch.Generator().manual_seed(heads)
    q, k, v, d = (torch.randn(n, count, DIM, generator=noise) for n in (heads, keys, keys, heads))
    size = -(-count // sequences.ranks)
    mine = slice(sequences.rank * size, (sequences.rank + 1) * size)

    def own(x: Tensor) -> Tensor:
        return torch.nn.functional.pad(x[:, mine], (0, 0, 0, size - x[:, mine].shape[1]))

    whole, parts = ([x.requires_grad_() for x in some] for some in ([q, k, v], [own(q), own(k), own(v)]))
    out = pack(0, whole[0], whole[1], whole[2], params)
    of_whole = torch.autograd.grad(out, whole, d.transpose(0, 1))
    got = sequences.attention(pack, count)(0, parts[0], parts[1], parts[2], params)
    of_parts = torch.autograd.grad(got, parts, own(d).transpose(0, 1))
    rows = len(out[mine])
    wrong = max((g - own(w)).abs().max().item() for g, w in zip(of_parts, of_whole, strict=True))
    return (got[:rows] - out[mine]).abs().max().item() if rows else 0.0, wrong


def test_any_number_of_ranks_computes_the_same() -> None:
    for found in spawn(4, whole_and_divided):
        assert max(map(max, found)) < 1e-5
