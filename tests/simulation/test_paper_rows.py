"""The page on the paper's figures says what bench/paper.py predicts today."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "paper.md").read_text()


@pytest.mark.slow
def test_the_page_has_the_predictions_of_today(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import paper
    import paper_rows

    rows = paper_rows.predicted_rows()
    for line in (line for line in paper.markdown(rows).splitlines() if line.startswith("|")):
        assert line in PAGE, line
    found = paper.summary(rows)
    text = re.sub(r"\s+", " ", PAGE)
    assert f"{found['tested']} rows, is for judging: **{found['within_15']} are within 15 %**" in text
    assert (
        f"{found['beyond_40']} beyond 40 %; with the fitted ones, {found['within_15_of_all']} of {found['rows']}"
        in text
    )
    assert f"{found['left_out_rows']} more values are left out" in text


def test_a_summary_counts_what_nothing_was_fitted_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    from paper import summary
    from simulator import Row

    rows = [Row("a", "x", 10, 11), Row("a", "y", 10, 15), Row("b", "z", 10, 30, fit=True), Row("b", "w", 10, 8.6)]
    found = summary(rows)
    assert (found["rows"], found["tested"], found["within_15"], found["within_15_of_all"]) == (4, 3, 2, 2)
    assert found["beyond_40"] == 1
    assert found["worst"] == {"row": "a: y", "ratio": 1.5}
    assert found["groups"] == {"a": "1 of 2", "b": "1 of 1"}
