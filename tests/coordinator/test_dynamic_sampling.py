"""Dynamic sampling selects the same prompts whatever the size of its rounds."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.coordinator.dynamic_sampling import DynamicSampling


def sample(keep: list[bool], first: int, target: int, oversampling: int, multiple: int) -> tuple[DynamicSampling, int]:
    """Samples a cyclic stream in which `keep` tells the useful positions; returns also the largest round."""
    sampling, largest = DynamicSampling(first, target, oversampling, multiple), 0
    while True:
        at = np.arange(sampling.position, sampling.position + sampling.count)
        assert sampling.count % multiple == 0
        assert sampling.count > 0
        largest = max(largest, sampling.count)
        if sampling.add_round(np.array(keep)[at % len(keep)]):
            return sampling, largest


@settings(deadline=None)
@given(
    st.lists(st.booleans(), min_size=1, max_size=40),
    st.integers(0, 100),
    st.integers(1, 8),
    st.integers(1, 5),
    st.sampled_from([1, 2, 3]),
)
def test_the_first_useful_prompts_are_selected_whatever_the_rounds(
    keep: list[bool], first: int, times: int, oversampling: int, multiple: int
) -> None:
    target = times * multiple
    sampling, largest = sample(keep, first, target, oversampling, multiple)
    result = sampling.result()
    stream = range(first, first + target * oversampling)
    good = [p for p in stream if keep[p % len(keep)]]
    if len(good) >= target:
        assert result.positions.tolist() == good[:target]
        assert result.next_position == good[target - 1] + 1
        assert result.filled == 0
    else:
        others = [p for p in stream if not keep[p % len(keep)]]
        assert result.positions.tolist() == sorted(good + others[: target - len(good)])
        assert result.next_position == first + target * oversampling
        assert result.filled == target - len(good)
    # Nothing is lost: every prompt is trained or counted as discarded.
    assert result.next_position - first == target + result.discarded
    assert largest <= target
    assert result.rounds == sampling.rounds
    assert len(sampling.selected()) <= target


def test_few_are_sampled_when_few_are_missing() -> None:
    sampling = DynamicSampling(0, 8, 10, 2)
    assert not sampling.add_round(np.array([True] * 7 + [False]))
    assert sampling.count == 2  # one is missing, and a round is a multiple of two
    assert not sampling.add_round(np.array([False, False]))
    assert sampling.add_round(np.array([False, True]))
    assert sampling.result().positions.tolist() == [0, 1, 2, 3, 4, 5, 6, 11]
    assert sampling.result().discarded == 4


def test_a_step_without_useful_prompts_is_filled_with_others() -> None:
    sampling, _ = sample([False], 5, 4, 3, 1)
    assert sampling.result().positions.tolist() == [5, 6, 7, 8]
    assert (sampling.result().next_position, sampling.result().filled, sampling.result().discarded) == (17, 4, 8)
