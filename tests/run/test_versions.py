"""What a run knows of its steps and versions agrees with a loop that is written out."""

import pytest

from distflow.run.versions import Versions


@pytest.mark.parametrize("delay", [0, 1, 3])
@pytest.mark.parametrize(("first", "last"), [(0, 1), (0, 7), (4, 9)])
def test_a_step_ends_just_before_the_one_that_generates_with_its_weights(delay: int, first: int, last: int) -> None:
    versions = Versions(delay, first, last)
    ended = [e for step in versions.begins if (e := versions.ended_before(step)) is not None]
    assert ended == list(range(first + 1, last + 1))  # each once, in order
    steps = [step for step in versions.begins if step <= last]
    assert steps == ended
    for step in steps:
        assert versions.of(step) == (versions.ended_before(step) or first)
    used = {versions.of(step) for step in steps}
    assert {v for v in range(first, last + 1) if versions.is_used(v)} == used


def test_the_first_vote_decides_where_a_run_stops() -> None:
    versions = Versions(2, 0, 10)
    for step in (3, 4, 5):
        versions.stop_after(step)
    assert versions.stop_step == 5  # those ahead had begun as much
