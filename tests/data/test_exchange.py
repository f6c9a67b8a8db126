"""Memory of the exchange: received bytes belong to the columns that view them, and only free ones are used again."""

import numpy as np
import pytest
import torch

from distflow.data.batch import Column, Ragged
from distflow.data.exchange import Slabs, exchange
from distflow.errors import DataError
from distflow.plan import Layout, Move, Partition
from simulate import simulate


def test_a_slab_in_use_is_never_handed_out_again() -> None:
    slabs = Slabs()
    first = slabs.slab(1000)
    view = first[100:200].view(torch.int32)
    view.fill_(7)
    del first
    second = slabs.slab(1000)
    second.fill_(0)
    assert (view == 7).all()
    assert second.data_ptr() != view.untyped_storage().data_ptr()


def test_a_free_slab_is_used_again() -> None:
    slabs = Slabs()
    pointer = slabs.slab(1000).data_ptr()
    assert slabs.slab(900).data_ptr() == pointer


def test_memory_does_not_grow_with_the_number_of_exchanges() -> None:
    slabs = Slabs()
    for size in (1000, 5000, 2000, 9000, 100) * 20:
        slabs.slab(size)
    assert len(slabs._pool) == 1


def split(deals: bool = True) -> Move:
    src, dst = Layout((0,), 1), Layout((1,), 1)
    return Move("m0", Partition("a", src, True, None), Partition("b", dst, True, None), ("x",), deals, 0)


def test_a_sample_that_nobody_holds_is_told() -> None:
    """A hole must not arrive as nothing."""
    column = Ragged.of([torch.arange(3), torch.arange(2)])
    with pytest.raises(DataError, match="sample 2 of the step is held by nobody"):
        simulate(
            {
                0: exchange(0, split(), 3, 1, (np.array([0, 1]), {"x": column}), None, Slabs()),
                1: exchange(1, split(), 3, 1, None, None, Slabs()),
            }
        )


def test_only_asked_fields_are_sent_and_bytes_are_counted() -> None:
    column = Ragged.of([torch.arange(1000), torch.arange(500)])
    columns: dict[str, Column] = {"x": column, "unread": torch.zeros(2, 10_000)}
    held = np.array([0, 1]), columns
    done = {}

    def keep(rank, steps):
        done[rank] = yield from steps

    ranks = {0: exchange(0, split(), 2, 1, held, None, Slabs()), 1: exchange(1, split(), 2, 1, None, None, Slabs())}
    simulate({r: keep(r, s) for r, s in ranks.items()})
    assert done[0].sent == done[1].received
    assert 12_000 < done[0].sent < 12_200  # 1500 × 8 and a small header
    assert done[0].kept == done[1].kept == done[0].received == 0
    assert list(done[1].columns) == ["x"]
