"""Which prompts make up a step, whatever the size of the draws."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from distflow.data.dynamic_sampling import DynamicSampling


def draw(keep: list[bool], first: int, wanted: int, rounds: int, unit: int) -> tuple[DynamicSampling, int]:
    """Draw from a stream in which `keep` says of each position, over and over, whether it is worth it."""
    made, biggest = DynamicSampling(first, wanted, rounds, unit), 0
    while True:
        at = np.arange(made.position, made.position + made.count)
        assert made.count % unit == 0
        assert made.count > 0
        biggest = max(biggest, made.count)
        if made.add(np.array(keep)[at % len(keep)]):
            return made, biggest


@given(
    st.lists(st.booleans(), min_size=1, max_size=40),
    st.integers(0, 100),
    st.integers(1, 8),
    st.integers(1, 5),
    st.sampled_from([1, 2, 3]),
)
def test_the_first_prompts_worth_it_whatever_is_drawn_at_a_time(
    keep: list[bool], first: int, times: int, rounds: int, unit: int
) -> None:
    wanted = times * unit
    made, biggest = draw(keep, first, wanted, rounds, unit)
    got = made.result()
    stream = range(first, first + wanted * rounds)
    good = [p for p in stream if keep[p % len(keep)]]
    if len(good) >= wanted:
        assert got.positions.tolist() == good[:wanted]
        assert got.next == good[wanted - 1] + 1
        assert got.filled == 0
    else:
        others = [p for p in stream if not keep[p % len(keep)]]
        assert got.positions.tolist() == sorted(good + others[: wanted - len(good)])
        assert got.next == first + wanted * rounds
        assert got.filled == wanted - len(good)
    # Nothing is lost: every prompt passed is trained or counted as discarded.
    assert got.next - first == wanted + got.discarded
    assert biggest <= wanted
    assert got.rounds == made.rounds
    assert len(made.useful()) <= wanted


def test_few_are_drawn_when_few_are_missing() -> None:
    made = DynamicSampling(0, 8, 10, 2)
    assert not made.add(np.array([True] * 7 + [False]))
    assert made.count == 2  # one is missing, and a draw is a multiple of two
    assert not made.add(np.array([False, False]))
    assert made.add(np.array([False, True]))
    assert made.result().positions.tolist() == [0, 1, 2, 3, 4, 5, 6, 11]
    assert made.result().discarded == 4


def test_nothing_worth_it_fills_the_step_and_ends() -> None:
    made, _ = draw([False], 5, 4, 3, 1)
    assert made.result().positions.tolist() == [5, 6, 7, 8]
    assert (made.result().next, made.result().filled, made.result().discarded) == (17, 4, 8)
