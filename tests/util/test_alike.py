"""What all workers would say alike, rank 0 says."""

import logging

import pytest

from distflow.util.alike import warn_alike


@pytest.mark.parametrize(("rank", "count"), [(None, 1), (0, 1), (3, 0)])
def test_rank_0_speaks_for_all(
    rank: int | None, count: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: rank is not None)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: rank)
    warn_alike(logging.getLogger("distflow.test"), "%d rows are left", 2)
    assert [r.getMessage() for r in caplog.records] == ["2 rows are left"] * count
