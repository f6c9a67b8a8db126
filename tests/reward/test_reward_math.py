"""The adapter to math-verify, which is optional."""

import pytest

pytest.importorskip("math_verify")

from distflow.reward.math_verify import score
from reward.helpers import batch_of, rewarding
from reward.helpers import score as scores


@pytest.mark.parametrize(
    ("truth", "response", "expected"),
    [
        ("1/2", "so $x = 0.5$", 1.0),
        (r"\frac{1}{2}", r"Thus \boxed{\frac12}.", 1.0),
        (r"$\sqrt{2}$", r"$2^{1/2}$", 1.0),
        ("48 + 24 = 72\n#### 72", "She sold 72.", 1.0),
        (72, "72", 1.0),
        ("(1, 2)", r"\boxed{(1,2)}", 1.0),
        ("5", "the answer is 6", 0.0),
        ("5", "", 0.0),
    ],
)
def test_equal_answers_score_alike_however_they_are_written(truth: object, response: str, expected: float) -> None:
    assert score("", response, truth) == expected


def test_a_ground_truth_without_mathematics_is_an_error() -> None:
    with pytest.raises(ValueError, match="ground truth '' holds no mathematical expression"):
        score("", "5", "")


def test_it_runs_as_a_reward() -> None:
    with rewarding({"call": "distflow.reward.math_verify:score"}) as reward:
        assert scores(reward, batch_of([r"\boxed{4}", "no idea"], answer=["4", "4"])) == [1.0, 0.0]
