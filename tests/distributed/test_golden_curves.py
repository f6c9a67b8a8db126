"""The same loss before and after: every built-in flow has golden curves in tests/golden, and so have some settings."""

from pathlib import Path

import pytest

from distflow.flows import BUILT_IN
from golden.curves import FLOWS, TUNED, config_of, curves_of, golden
from warm import distflow_run


@pytest.mark.parametrize("flow", [*FLOWS, *TUNED])
def test_a_flow_has_its_golden_curve(flow: str, tmp_path: Path) -> None:
    ended = distflow_run(config_of(flow, tmp_path))
    assert ended.codes == [0], ended.err
    curves, expected = curves_of(tmp_path / flow), golden(flow)
    assert curves.keys() == expected.keys()
    for name, curve in curves.items():
        assert curve == pytest.approx(expected[name], rel=1e-3, abs=2e-5), name  # CPUs round differently


def test_every_built_in_flow_has_one() -> None:
    assert FLOWS.keys() == BUILT_IN.keys() - {"evaluate"}


def test_the_settings_of_a_tuned_run_have_an_effect() -> None:
    """Else its curves could not tell whether they reach the trainer: clips are reached, the learning rate moves."""
    for name, metrics in {
        "grpo_tuned": ("actor/clip_frac", "actor/dual_clip_frac", "actor/kl"),
        "dapo_tuned": ("actor/clip_frac",),
        "ppo_tuned": ("actor/clip_frac", "critic/clip_frac"),
    }.items():
        curves = golden(name)
        for metric in metrics:
            assert max(curves[metric]) > 0.002, metric
        assert min(curves["actor/grad_norm"]) > TUNED[name]["train"]["clip_grad"]
        assert len(set(curves["actor/lr"])) > 1 or name == "ppo_tuned"
    weights = golden("grpo_entropy")["actor/entropy_weight"]
    assert 0 in weights  # where the entropy is above the target
    assert len(set(weights)) > 2
    # With several updates of a step, the first of them has the weights of the rollout, at any temperature.
    assert max(golden("grpo_tuned")["rollout/mismatch_kl"]) < 1e-9
