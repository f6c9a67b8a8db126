"""One exchange: what is sent, what is counted, and that later exchanges do not touch what an earlier one received."""

import numpy as np
import pytest
import torch

from distflow.batch.batch import Column, Ragged
from distflow.comm.allocator import CachingAllocator
from distflow.comm.balance import imbalance
from distflow.comm.collectives import Communication
from distflow.comm.exchange import MoveResult, exchange
from distflow.errors import DataError
from distflow.plan import Layout, Move, Partition
from simulate import simulate

MOVE = Move(
    "m0",
    Partition("a", Layout((0,), 1), True, None),
    Partition("b", Layout((1,), 1), True, None),
    ("x",),
    assigns=True,
    expected_bytes=0,
)


def move(columns: dict[str, Column], samples: int, allocators: dict[int, CachingAllocator]) -> dict[int, MoveResult]:
    """Moves the columns from rank 0 to rank 1; returns the result of both."""
    results = {}
    held = np.arange(len(columns["x"])), columns

    def run(rank: int) -> Communication[None]:
        own = held if rank == 0 else None
        results[rank] = yield from exchange(rank, MOVE, samples, 1, own, None, allocators[rank])

    simulate({rank: run(rank) for rank in (0, 1)})
    return results


def allocators() -> dict[int, CachingAllocator]:
    return {0: CachingAllocator(), 1: CachingAllocator()}


def test_a_sample_that_no_rank_holds_is_an_error() -> None:
    column = Ragged.of([torch.arange(3), torch.arange(2)])
    with pytest.raises(DataError, match="no rank holds sample 2 of the step"):
        move({"x": column}, 3, allocators())


def test_only_fields_of_the_move_are_sent_and_bytes_are_counted() -> None:
    column = Ragged.of([torch.arange(1000), torch.arange(500)])
    results = move({"x": column, "unread": torch.zeros(2, 10_000)}, 2, allocators())
    assert results[0].sent == results[1].received
    assert 12_000 < results[0].sent < 12_200  # 1500 × 8 and a small header
    assert results[0].kept == results[1].kept == results[0].received == 0
    assert list(results[1].columns) == ["x"]


def test_a_received_tensor_that_somebody_keeps_is_never_overwritten() -> None:
    """Whatever a node keeps of a column: the column, one sample, or a slice of it."""
    shared, kept, pointers = allocators(), [], set()
    for turn in range(30):
        received = move({"x": Ragged.of([torch.full((100,), turn), torch.full((50,), turn)])}, 2, shared)[1]
        column = received.columns["x"]
        assert isinstance(column, Ragged)
        pointers.add(column.values.data_ptr())
        if turn % 3 == 0:
            kept.append((turn, [column.joined(), column[1], column[0][10:20]][turn % 9 // 3]))
        del received, column
    assert all((tensor == turn).all() for turn, tensor in kept)
    assert len(pointers) <= len(kept) + 2  # and what nobody keeps is used again


@pytest.mark.parametrize("balance", ["tokens", None])
def test_samples_are_balanced_by_the_tokens_of_their_field_not_by_bytes(balance: str | None) -> None:
    """And the imbalance of a move is that which it leaves, not that which it found."""
    lengths = np.array([900, 800, 700, 600, 90, 80, 70, 60])  # all the long ones are on the first rank
    texts = ["x" * (1000 - n) for n in lengths]  # whose texts are short: in bytes nothing would be uneven
    two = Layout((0, 1), 2)
    task = Move(
        "m0",
        Partition("a", two, True, None),
        Partition("b", two, True, balance),
        ("text", "tokens"),
        assigns=True,
        expected_bytes=0,
    )
    results: dict[int, MoveResult] = {}

    def run(rank: int) -> Communication[None]:
        own = np.arange(4 * rank, 4 * rank + 4)
        tokens = Ragged.of([torch.zeros(n, dtype=torch.uint8) for n in lengths[own]])
        columns: dict[str, Column] = {"text": [texts[i] for i in own], "tokens": tokens}
        results[rank] = yield from exchange(rank, task, 8, 1, (own, columns), None, CachingAllocator())

    simulate({rank: run(rank) for rank in (0, 1)})
    new = results[0].assignment.new
    before, after = (imbalance(x, lengths, 2) for x in (results[0].assignment.old, new))
    assert before > 1.5
    assert (new == results[1].assignment.new).all()
    if balance:
        assert after < 0.02
        assert results[0].imbalance == results[1].imbalance == pytest.approx(after)
        assert sum(len(t) for t in results[0].columns["tokens"]) == pytest.approx(lengths.sum() / 2, rel=0.01)
    else:
        assert (new == results[0].assignment.old).all()  # nothing moves unless it must
