"""Processes that hang, die or send invalid messages are replaced; other samples are not affected."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import date
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distflow.reward.errors import RewardError
from distflow.reward.function import RewardSpec
from distflow.reward.pool import Pool, RewardCall
from distflow.reward.signature import NoScore, Result, Score
from limits import wait_until
from reward.helpers import FILE, HERE, children_of, gone, pids_in

BEHAVE = RewardSpec(f"{FILE}:behave")


@contextmanager
def pool_of(*functions: RewardSpec, processes: int = 1, time_limit_s: float = 60.0, **more: Any) -> Iterator[Pool]:
    with closing(Pool(functions or (BEHAVE,), processes, time_limit_s, HERE, **more)) as pool:
        yield pool


def call(text: str) -> RewardCall:
    return RewardCall(0, {"data_source": "", "solution_str": text, "ground_truth": None})


def run(pool: Pool, *texts: str) -> list[Result]:
    results = dict(pool.run([call(t) for t in texts]))
    assert sorted(results) == list(range(len(texts)))
    return [r for i in range(len(texts)) for r in results[i]]


def reason(result: Result) -> str:
    assert isinstance(result, NoScore), result
    return result.reason


ONE = Score(1.0, {})


def test_the_child_has_no_torch() -> None:
    with pool_of() as pool:
        assert run(pool, "torch") == [Score(0.0, {})]


def test_prints_go_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    with pool_of() as pool:
        assert run(pool, "print", "fine") == [ONE, ONE]
    out, err = capfd.readouterr()
    assert out == ""
    assert '{"results"' in err
    assert "from a subprocess" in err


def test_an_exception_is_reported_with_the_users_line() -> None:
    with pool_of() as pool:
        raised, library, left = run(pool, "raise", "library", "sys.exit")
        assert pool.restarts == 0
    lines = (HERE / FILE).read_text().splitlines()
    at = {n + 1: line for n, line in enumerate(lines)}
    message, _, number = reason(raised).removesuffix(")").rpartition(":")
    assert message == f"raised ValueError: no number in the response ({HERE / FILE}"
    assert "line of the raise" in at[int(number)]
    assert reason(library).startswith("raised ValueError: invalid literal for int() with base 10: 'seven' (")
    assert "line of the library" in at[int(reason(library).removesuffix(")").rpartition(":")[2])]
    assert reason(left).startswith("raised SystemExit: 3 (")


def test_only_the_sample_that_hangs_fails() -> None:
    with pool_of(time_limit_s=1.0, processes=2) as pool:
        results = run(pool, *["fine"] * 20, "hang", *["fine"] * 20)
        assert pool.restarts == 1
    assert reason(results.pop(20)) == "took longer than 1 s; raise `reward.time_limit_s` if it needs more time"
    assert results == [ONE] * 40


def test_a_stopped_process_does_not_hold_up_the_pool() -> None:
    with pool_of(time_limit_s=1.0) as pool:
        results = run(pool, "stop", "fine")
        assert "took longer" in reason(results[0])
        assert results[1] == ONE
        run(pool, "fine")
        os.kill(pool.pids[0], signal.SIGSTOP)
        results = run(pool, "x" * 5_000_000, "fine")  # more than its channel takes at once
        assert "took longer" in reason(results[0])
        assert results[1] == ONE


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ("exit", "ended its process in both attempts: it exited with 7"),
        ("crash", "ended its process in both attempts: it was killed by SIGSEGV"),
        ("interfere rubbish", "ended its process in both attempts: it wrote something other than JSON to the channel"),
        ("interfere strange", "ended its process in both attempts: it wrote to the channel of its process; write only"),
        ("close", "ended its process in both attempts: it "),
    ],
)
def test_only_the_sample_that_kills_its_process_fails(
    behaviour: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distflow.userproc.processes._EXIT_S", 0.3)
    with pool_of(processes=2) as pool:
        results = run(pool, *["fine"] * 20, behaviour, *["fine"] * 20)
        assert pool.restarts == 2
    assert reason(results.pop(20)).startswith(message)
    assert results == [ONE] * 40


def test_the_time_limit_holds_for_half_a_message() -> None:
    with pool_of(time_limit_s=1.0) as pool:
        half, fine = run(pool, "interfere half", "fine")
    assert "took longer" in reason(half)
    assert fine == ONE


def test_a_call_that_was_queued_behind_others_has_its_whole_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fast calls are sent several at once; each has its limit from when the one before it has ended."""
    clock, done = [0.0], list[list[Result]]()
    with pool_of(time_limit_s=60.0) as pool:
        run(pool, "fine")
        pool._seconds = [0.0]
        monkeypatch.setattr("distflow.userproc.processes.time", SimpleNamespace(monotonic=lambda: clock[0]))
        (tmp_path / "0").touch()
        for i, results in pool.run([call(f"after {tmp_path / str(i)}") for i in range(6)]):
            assert len(pool._workers[0].calls) == 5 - i  # all others are with the process already
            done.append(results)
            clock[0] += 40.0
            (tmp_path / str(i + 1)).touch()
        assert pool.restarts == 0
    assert done == [[ONE]] * 6


def test_a_sample_gets_a_second_attempt(tmp_path: Path) -> None:
    with pool_of() as pool:
        assert run(pool, f"once {tmp_path / 'died'}", "fine") == [ONE, ONE]
        assert pool.restarts == 1


def test_a_process_killed_from_outside_is_replaced(tmp_path: Path) -> None:
    with pool_of() as pool:
        assert run(pool, "fine") == [ONE]
        (idle,) = pool.pids
        os.kill(idle, signal.SIGKILL)
        assert run(pool, "fine", "fine") == [ONE, ONE]
        assert gone(idle)

        results: list[Result] = []
        runner = threading.Thread(target=lambda: results.extend(run(pool, f"wait {tmp_path / 'pid'}", "fine")))
        runner.start()
        (busy,) = pids_in(tmp_path / "pid")
        os.kill(busy, signal.SIGKILL)
        runner.join()
        assert results == [ONE, ONE]
        assert pool.restarts == 2


@pytest.mark.parametrize("end", ["hang", "exit", "busy"])
def test_what_a_function_started_dies_with_its_process(tmp_path: Path, end: str) -> None:
    with pool_of(time_limit_s=60.0 if end == "exit" else 1.0) as pool:
        reason(run(pool, f"family {tmp_path / 'pids'} {end}")[0])
        for pid in pids_in(tmp_path / "pids"):
            wait_until(partial(gone, pid))


def test_close_leaves_nothing_behind(tmp_path: Path) -> None:
    before = children_of(os.getpid())
    with pool_of(processes=3) as pool:
        assert run(pool, f"family {tmp_path / 'pids'} live", "fine") == [ONE, ONE]
        family = pids_in(tmp_path / "pids")
        assert not any(map(gone, family))
        pids = pool.pids
    for pid in (*pids, *family):
        wait_until(partial(gone, pid))
    assert children_of(os.getpid()) <= before
    pool.close()  # closing twice is harmless


def test_closing_a_run_early_drops_its_calls() -> None:
    with pool_of(processes=2) as pool:
        finished = pool.run([call("fine"), call("hang"), call("hang")])
        assert next(finished) == (0, [ONE])
        finished.close()
        assert run(pool, "fine", "fine", "number 3") == [ONE, ONE, Score(3.0, {})]


def test_order_is_kept_with_many_samples_and_processes() -> None:
    with pool_of(processes=4) as pool:
        for n in (1, 3, 500):
            assert run(pool, *[f"number {i}" for i in range(n)]) == [Score(float(i), {}) for i in range(n)]
        assert list(pool.run([])) == []


PARENT = """
import sys, threading, time
from pathlib import Path
from distflow.reward.function import RewardSpec
from distflow.reward.pool import Pool, RewardCall

base, text, pids = sys.argv[1:]
pool = Pool([RewardSpec("user_rewards.py:behave")], 2, 1000.0, Path(base))
threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
list(pool.run([RewardCall(0, {"data_source": "", "solution_str": "fine", "ground_truth": None})] * 2))
Path(pids + ".new").write_text(" ".join(map(str, pool.pids)))
Path(pids + ".new").rename(pids)
if text:
    list(pool.run([RewardCall(0, {"data_source": "", "solution_str": text, "ground_truth": None})]))
time.sleep(1000)
"""


@pytest.mark.parametrize("end", ["", "hang", "busy"])
def test_no_child_outlives_its_parent(tmp_path: Path, end: str) -> None:
    text = f"family {tmp_path / 'family'} {end}" if end else ""
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(HERE), text, str(tmp_path / "pids")])
    try:
        pids = pids_in(tmp_path / "pids")
        assert len(pids) == 2
        pids += pids_in(tmp_path / "family") if end else []
        assert not any(map(gone, pids))
    finally:
        parent.kill()
        parent.wait()
    for pid in pids:
        wait_until(partial(gone, pid))


def test_processes_live_on_when_the_thread_that_started_them_ends() -> None:
    pools: list[Pool] = []
    starter = threading.Thread(target=lambda: pools.append(Pool([BEHAVE], 2, 60.0, HERE)))
    starter.start()
    starter.join()
    with closing(pools[0]) as pool:
        assert run(pool, "fine", "fine") == [ONE, ONE]
        assert pool.restarts == 0


def test_functions_that_do_not_load_are_named(tmp_path: Path) -> None:
    def message(ref: str, **options: Any) -> str:
        with pool_of(RewardSpec(ref), **options) as pool, pytest.raises(RewardError) as e:
            _ = pool.signatures
        return str(e.value)

    assert "reward 'exacd': 'user_rewards.py:exacd' has no 'exacd'; did you mean 'exact'" in message(f"{FILE}:exacd")
    assert "there is no file" in message("nowhere.py:score")
    assert "reward 'unknown' (user_rewards.py:unknown): its parameters (text, answer) match neither" in message(
        f"{FILE}:unknown"
    )
    assert "is a int, not a function" in message(f"{FILE}:NOT_A_FUNCTION")
    (tmp_path / "leaves.py").write_text("import os\nos._exit(5)\n")
    assert "3 processes in a row died while loading, the last one exited with 5" in message(
        f"{tmp_path}/leaves.py:score"
    )
    (tmp_path / "waits.py").write_text("import time\ntime.sleep(1000)\n")
    assert "did not load within 0.5 s" in message(f"{tmp_path}/waits.py:score", load_limit_s=0.5)


def test_data_that_cannot_be_passed_is_named() -> None:
    with pool_of() as pool:
        bad = RewardCall(0, {"solution_str": "fine", "extra_info": {"day": date(2025, 1, 1)}})
        with pytest.raises(RewardError, match=r"reward 'behave': column 'extra_info' cannot be passed to it: .*date"):
            list(pool.run([bad]))
        assert run(pool, "fine") == [ONE]
