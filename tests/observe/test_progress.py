"""What a step's line shows."""

from distflow.observe.progress import step_line

METRICS = {
    "actor/entropy": 1.5,
    "reward/mean": 0.25,
    "actor/loss": 0.1,
    "actor/grad_norm": 2.0,
    "response_length/mean": 12.0,
    "timing_s/update": 3.0,
}


def test_the_numbers_worth_a_glance_come_first() -> None:
    assert step_line(METRICS) == "reward/mean 0.25  actor/loss 0.1  response_length/mean 12  actor/grad_norm 2"


def test_a_rollout_of_another_model_than_is_trained_shows() -> None:
    assert "mismatch" not in step_line(METRICS | {"rollout/mismatch_kl": 0.001})
    assert step_line(METRICS | {"reward/failures": 0.0}) == step_line(METRICS)
    assert step_line(METRICS | {"reward/failures": 3.0}).endswith("actor/grad_norm 2  reward/failures 3")
    assert step_line(METRICS | {"rollout/mismatch_kl": 3.1}).endswith("actor/grad_norm 2  rollout/mismatch_kl 3.1")
