"""The same loss before and after: every built-in flow has a golden curve, in tests/golden."""

from pathlib import Path

import pytest

from distflow.flows import BUILT_IN
from golden.curves import FLOWS, config_of, curves_of, golden
from warm import distflow_run


@pytest.mark.parametrize("flow", FLOWS)
def test_a_flow_has_its_golden_curve(flow: str, tmp_path: Path) -> None:
    ended = distflow_run(config_of(flow, tmp_path))
    assert ended.codes == [0], ended.err
    curves, expected = curves_of(tmp_path / flow), golden(flow)
    assert curves.keys() == expected.keys()
    for name, curve in curves.items():
        assert curve == pytest.approx(expected[name], rel=1e-3, abs=2e-5), name  # CPUs round differently


def test_every_built_in_flow_has_one() -> None:
    assert FLOWS.keys() == BUILT_IN.keys() - {"evaluate"}
