import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.errors import PlacementError
from distflow.plan import Layout, format_ranks, parse_ranks
from distflow.plan.communicators import sequence_groups
from distflow.plan.layout import contiguous_share


def test_a_replica_is_tp_consecutive_ranks() -> None:
    layout = Layout((4, 5, 6, 7, 0, 1), dp=3, tp=2)
    assert layout.replicas == ((4, 5), (6, 7), (0, 1))
    assert [layout.replica_of(r) for r in (4, 5, 6, 7, 0, 1, 2)] == [0, 0, 1, 1, 2, 2, None]
    assert str(layout) == "dp3·tp2"
    assert str(Layout((0, 1), 2)) == "dp2"


def test_ranks_that_divide_sequences_hold_the_same_samples_and_weights_like_replicas() -> None:
    layout = Layout(tuple(range(8)), dp=2, tp=2, sp=2)
    assert layout.replicas == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert str(layout) == "dp2·sp2·tp2"
    assert layout.without_sp == Layout(tuple(range(8)), dp=4, tp=2)
    assert [c.ranks for c in sequence_groups(layout)] == [(0, 2), (1, 3), (4, 6), (5, 7)]
    with pytest.raises(PlacementError, match="dp 2 × sp 3 × tp 2 does not fit 8 ranks"):
        Layout(tuple(range(8)), 2, 2, 3)


@given(ranks=st.lists(st.integers(0, 99), min_size=1, unique=True), data=st.data())
def test_every_rank_is_in_exactly_one_replica(ranks: list[int], data: st.DataObject) -> None:
    tp = data.draw(st.sampled_from([t for t in range(1, len(ranks) + 1) if len(ranks) % t == 0]))
    layout = Layout(tuple(ranks), len(ranks) // tp, tp)
    assert [r for replica in layout.replicas for r in replica] == ranks
    assert {len(replica) for replica in layout.replicas} == {tp}
    assert len(layout.replicas) == layout.dp
    assert all(r in layout.replicas[layout.replica_of(r) or 0] for r in ranks)


@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (4, 2), (2, 1), (3, 2)])
def test_dp_times_tp_is_the_number_of_ranks(dp: int, tp: int) -> None:
    with pytest.raises(PlacementError, match=f"dp {dp} × tp {tp} does not fit 4 ranks"):
        Layout((0, 1, 2, 3), dp, tp)


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("all", range(8)),
        (" all ", range(8)),
        ("0-3", range(4)),
        ("4-", range(4, 8)),
        ("7", [7]),
        ("7-", [7]),
        ("0,2,5-7", [0, 2, 5, 6, 7]),
        ("5-7, 0", [5, 6, 7, 0]),  # the order is kept: it makes the replicas
        ("0%-50%", range(4)),
        ("50%-", range(4, 8)),
        ("0%-100%", range(8)),
        ("25%-75%", range(2, 6)),
        ("0%-25%,7", [0, 1, 7]),
        ("2-50%", [2, 3]),
    ],
)
def test_ranks_are_parsed(text: str, ranks: range | list[int]) -> None:
    assert parse_ranks(text, 8, "here") == tuple(ranks)


@given(workers=st.integers(1, 200), cuts=st.lists(st.integers(1, 99), max_size=4, unique=True))
def test_shares_divide_the_workers_without_gap_or_overlap(workers: int, cuts: list[int]) -> None:
    marks = [0, *sorted(cuts), 100]
    ranks: list[int] = []
    for a, b in pairwise(marks):
        if workers * a // 100 < workers * b // 100:  # a share that is not empty
            ranks += parse_ranks(f"{a}%-{b}%", workers, "here")
    assert ranks == list(range(workers))


@settings(deadline=None)
@given(st.integers(0, 200), st.integers(1, 60))
def test_shares_of_units_are_contiguous_and_as_even_as_possible(units: int, replicas: int) -> None:
    shares = [contiguous_share(units, replicas, replica) for replica in range(replicas)]
    assert [i for first, last in shares for i in range(first, last)] == list(range(units))
    assert {last - first for first, last in shares} <= {units // replicas, -(-units // replicas)}
    for replica, (first, last) in enumerate(shares):
        assert all(i * replicas // units == replica for i in range(first, last))


@settings(deadline=None)
@given(st.lists(st.integers(0, 60), min_size=1, unique=True))
def test_formatted_ranks_parse_to_the_same(ranks: list[int]) -> None:
    text = format_ranks(tuple(ranks))
    assert parse_ranks(text, 61, "here") == tuple(ranks)
    assert len(text) <= len(",".join(map(str, ranks)))


def test_ranks_are_formatted_briefly() -> None:
    assert format_ranks((0, 1, 2, 3, 8)) == "0-3,8"
    assert format_ranks(tuple(range(1024))) == "0-1023"
    assert format_ranks(()) == ""


@pytest.mark.parametrize("text", ["", "a", "0-3-5", "-3", "1,,2", "50%", "0..3", "all,1", "1.5", "0-3%%"])
def test_text_that_is_not_a_set_of_ranks_is_refused_with_examples(text: str) -> None:
    with pytest.raises(
        PlacementError, match=re.escape(f"placement.ranks.g: '{text}' is not a set of ranks; write 'all'")
    ):
        parse_ranks(text, 8, "placement.ranks.g")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0-8", "'0-8' names ranks 0-8, but there are 8 workers (0-7)"),
        ("8", "names ranks 8-8, but there are 8 workers"),
        ("8-", "'8-' is an empty range of 8 workers"),
        ("3-1", "'3-1' is an empty range of 8 workers"),
        ("0%-1%", "'0%-1%' is an empty range of 8 workers"),
        ("50%-150%", "'50%-150%' names ranks 4-11, but there are 8 workers (0-7)"),
        ("0-3,3", "'0-3,3' names a rank twice"),
        ("0%-50%,50%-,0", "names a rank twice"),
    ],
)
def test_impossible_ranks_are_refused(text: str, message: str) -> None:
    with pytest.raises(PlacementError, match=re.escape(message)) as e:
        parse_ranks(text, 8, "placement.ranks.g")
    assert str(e.value).startswith("placement.ranks.g: ")
