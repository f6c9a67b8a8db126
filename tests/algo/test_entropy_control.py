"""The control of the entropy bonus: by hand, and where it comes to rest."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distflow.algo.entropy_control import applied_weight, entropy_weight
from distflow.errors import ConfigError


def test_by_hand() -> None:
    assert entropy_weight(0.1, 0.3, target=0.5, step=0.02, highest=1.0) == pytest.approx(0.12)
    assert entropy_weight(0.1, 0.5, target=0.5, step=0.02, highest=1.0) == pytest.approx(0.12)
    assert entropy_weight(0.1, 0.6, target=0.5, step=0.02, highest=1.0) == pytest.approx(0.08)
    assert entropy_weight(0.01, 0.6, target=0.5, step=0.02, highest=1.0) == 0.0
    assert entropy_weight(0.1, 0.3, target=0.5, step=0.02, highest=0.11) == 0.11
    assert applied_weight(0.1, None, 0.5) == 0.1
    assert applied_weight(0.1, 0.5, 0.5) == 0.1
    assert applied_weight(0.1, 0.51, 0.5) == 0.0


@given(st.floats(0, 1), st.lists(st.floats(0, 5), max_size=20))
def test_the_weight_stays_within_its_bounds(weight: float, entropies: list[float]) -> None:
    for entropy in entropies:
        weight = entropy_weight(weight, entropy, 0.7, 0.3, 1.0)
        assert 0 <= weight <= 1


def test_it_holds_the_entropy_at_the_target() -> None:
    weight, entropy, seen = 0.0, 2.0, []
    for _ in range(400):  # where the entropy falls, and a bonus lifts it
        entropy += 0.5 * applied_weight(weight, entropy, 1.0) - 0.02
        weight = entropy_weight(weight, entropy, 1.0, 0.005, 1.0)
        seen.append(entropy)
    assert min(seen) > 0.5
    assert 0.8 < sum(seen[-100:]) / 100 < 1.3


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(ConfigError, match="has a target of -1; it must be 0 or more"):
        entropy_weight(0.1, 0.3, -1, 0.1, 1.0)
