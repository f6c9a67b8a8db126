"""The stream: every row once per epoch, the same for any number of workers, resumed by the step number alone."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distflow.dataset.dataset import Dataset
from distflow.dataset.loader import Loader
from distflow.errors import DataError
from limits import load_factor, wait_until

Make = Callable[[int], Dataset]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Rows {"x": 0} … {"x": n - 1}."""
    datasets: dict[int, Dataset] = {}
    home = tmp_path_factory.mktemp("loader")

    def dataset(n: int) -> Dataset:
        if n not in datasets:
            file = home / f"{n}.jsonl"
            file.write_text("".join(json.dumps({"x": i, "tags": [i]}) + "\n" for i in range(n)))
            datasets[n] = Dataset([file], cache=home / "cache")
        return datasets[n]

    return dataset


def stream(loader: Loader, steps: int, replicas: int = 1, first: int = 0) -> tuple[list[int], list[int]]:
    """All (ids, x) of some steps, of all replicas in order."""
    ids: list[int] = []
    xs: list[int] = []
    for step in range(first, first + steps):
        for replica in range(replicas):
            i, columns = loader.load(step, replica, replicas)
            ids += i.tolist()
            xs += columns["x"]
    return ids, xs


SHAPES = {
    "n": st.integers(1, 40),
    "share": st.integers(1, 6),
    "replicas": st.integers(1, 5),
    "repeat": st.integers(1, 3),
}


@given(**SHAPES, seed=st.integers(0, 2**32))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_row_comes_exactly_once_per_epoch(
    make: Make, n: int, share: int, replicas: int, repeat: int, seed: int
) -> None:
    prompts = share * replicas
    loader = Loader(make(n), prompts, repeat, seed)
    steps = -(-3 * n // prompts)  # at least three epochs
    ids, xs = stream(loader, steps, replicas)
    assert ids == list(range(steps * prompts * repeat))
    groups = xs[::repeat]
    assert xs == [x for x in groups for _ in range(repeat)]
    for epoch in range(3):
        assert sorted(groups[epoch * n : (epoch + 1) * n]) == list(range(n))


@given(**SHAPES, step=st.integers(0, 10**9))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_number_of_workers_changes_nothing(
    make: Make, n: int, share: int, replicas: int, repeat: int, step: int
) -> None:
    loader = Loader(make(n), share * replicas, repeat, seed=1)
    assert stream(loader, 2, replicas, first=step) == stream(loader, 2, 1, first=step)


def test_the_step_number_is_the_whole_state(make: Make) -> None:
    whole = stream(Loader(make(7), 3, 2, seed=5), 10)
    a = stream(Loader(make(7), 3, 2, seed=5), 4)
    b = stream(Loader(make(7), 3, 2, seed=5), 6, first=4)
    assert (a[0] + b[0], a[1] + b[1]) == whole


def test_epochs_and_seeds_differ(make: Make) -> None:
    _, xs = stream(Loader(make(30), 30, 1, seed=0), 2)
    assert xs[:30] != xs[30:]
    assert xs[:30] != stream(Loader(make(30), 30, 1, seed=1), 1)[1]


def test_a_step_larger_than_the_data_runs_over_several_epochs(make: Make) -> None:
    _, xs = stream(Loader(make(3), 8, 1, seed=0), 1)
    assert sorted(xs[:3]) == sorted(xs[3:6]) == [0, 1, 2]
    assert len(set(xs[6:])) == 2


def test_ids(make: Make) -> None:
    loader = Loader(make(10), prompts=4, repeat=3, seed=0)
    ids, columns = loader.load(1, 1, 2)
    assert ids.dtype == "int64"
    assert ids.tolist() == [18, 19, 20, 21, 22, 23]
    assert list(columns) == ["x", "tags"]
    assert columns["tags"][0] is columns["tags"][2]  # one object per prompt, however often it is repeated


def test_only_the_share_of_the_replica_is_read(make: Make) -> None:
    rows = make(40)
    with patch.object(Dataset, "__getitem__", autospec=True, side_effect=Dataset.__getitem__) as read:
        Loader(rows, prompts=8, repeat=16, seed=0).load(0, 1, 4)
    assert read.call_count == 2


@pytest.mark.parametrize(("prompts", "shares"), [(10, [3, 2, 3, 2]), (3, [1, 1, 1, 0]), (2, [1, 0, 1, 0])])
def test_shares_differ_by_at_most_one_prompt_and_may_be_empty(make: Make, prompts: int, shares: list[int]) -> None:
    loader = Loader(make(5), prompts, 2, 0)
    parts = [loader.load(1, replica, 4) for replica in range(4)]
    assert [len(ids) for ids, _ in parts] == [2 * n for n in shares]
    ids, columns = loader.load(1, 0, 1)
    assert [i for part, _ in parts for i in part.tolist()] == ids.tolist()
    for name, values in columns.items():
        assert [v for _, part in parts for v in part[name]] == values


def test_an_unknown_replica_is_refused(make: Make) -> None:
    with pytest.raises(IndexError, match="replica 2 of 2"):
        Loader(make(5), 4, 1, 0).load(0, 2, 2)


def test_prefetch_loads_the_same_as_load_and_only_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Loader(make(20), 4, 2, seed=3)
    loader = Loader(make(20), 4, 2, seed=3)
    threads: list[str] = []
    original = Loader._load

    def recorded(*args: Any) -> Any:
        threads.append(threading.current_thread().name)
        return original(*args)

    monkeypatch.setattr(Loader, "_load", recorded)
    loader.prefetch(6, 1, 2)
    loader.prefetch(6, 1, 2)
    ids, columns = loader.load(6, 1, 2)
    assert threads == ["prefetch step 6"]
    again = plain.load(6, 1, 2)
    assert ids.tolist() == again[0].tolist()
    assert columns == again[1]
    loader.load(6, 1, 2)  # not prefetched again: loaded now
    assert len(threads) == 3


def test_loading_another_step_keeps_the_prefetched_one(make: Make) -> None:
    loader = Loader(make(20), 4, 1, seed=3)
    loader.prefetch(1, 0, 1)
    assert loader.load(0, 0, 1)[0].tolist() == [0, 1, 2, 3]
    assert loader.load(1, 0, 1)[0].tolist() == [4, 5, 6, 7]


def test_an_error_while_prefetching_is_raised_by_load(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"x": 1}\nbroken\n')
    loader = Loader(Dataset([file], cache=tmp_path / "cache"), 2, 1, 0)
    loader.prefetch(0, 0, 1)
    with pytest.raises(DataError, match=r"a\.jsonl:2"):
        loader.load(0, 0, 1)


def test_unused_prefetches_do_not_pile_up(make: Make) -> None:
    loader = Loader(make(20), 4, 1, seed=3)
    before = threading.active_count()
    for step in range(50):
        loader.prefetch(step, 0, 1)
    wait_until(lambda: threading.active_count() == before, 5)
    assert loader.load(49, 0, 1)[0].tolist() == [196, 197, 198, 199]


def test_a_running_prefetch_does_not_delay_the_exit(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"x": 1}\n')
    code = f"""
import time
from distflow.dataset.loader import Loader
from distflow.dataset.dataset import Dataset
loader = Loader(Dataset([{str(file)!r}], cache=__import__("pathlib").Path({str(tmp_path)!r}) / "cache"), 1, 1, 0)
loader._load = lambda *a: time.sleep(60)
loader.prefetch(0, 0, 1)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=20 * load_factor())


def test_without_shuffle_every_epoch_has_the_rows_in_their_order(make: Make) -> None:
    loader = Loader(make(5), 2, 2, seed=3, shuffle=False)
    ids, xs = stream(loader, 5, replicas=2)
    assert ids == list(range(20))
    assert xs[::2] == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4]
