"""Processes that hang, die or talk nonsense are replaced; whatever a function does, the rest goes on."""

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
from typing import Any

import pytest

from distflow.reward.errors import RewardError
from distflow.reward.function import RewardFunction
from distflow.reward.pool import Call, Pool
from distflow.reward.signature import Failure, Result, Score
from reward.helpers import FILE, HERE, children_of, gone, pids_in, wait_for

BEHAVE = RewardFunction(f"{FILE}:behave")


@contextmanager
def pool_of(*functions: RewardFunction, processes: int = 1, time_limit_s: float = 60.0, **more: Any) -> Iterator[Pool]:
    with closing(Pool(functions or (BEHAVE,), processes, time_limit_s, HERE, **more)) as pool:
        yield pool


def call(text: str) -> Call:
    return Call(0, {"data_source": "", "solution_str": text, "ground_truth": None})


def run(pool: Pool, *texts: str) -> list[Result]:
    found = dict(pool.run([call(t) for t in texts]))
    assert sorted(found) == list(range(len(texts)))
    return [r for i in range(len(texts)) for r in found[i]]


def fail(result: Result) -> str:
    assert isinstance(result, Failure), result
    return result.what


ONE = Score(1.0, {})


def test_the_child_has_no_torch() -> None:
    with pool_of() as pool:
        assert run(pool, "torch") == [Score(0.0, {})]


def test_prints_do_not_disturb(capfd: pytest.CaptureFixture[str]) -> None:
    with pool_of() as pool:
        assert run(pool, "print", "fine") == [ONE, ONE]
    out, err = capfd.readouterr()
    assert out == ""
    assert '{"results"' in err
    assert "from a subprocess" in err


def test_an_exception_is_told_with_the_users_line() -> None:
    with pool_of() as pool:
        raised, library, left = run(pool, "raise", "library", "sys.exit")
        assert pool.restarts == 0
    lines = (HERE / FILE).read_text().splitlines()
    at = {n + 1: line for n, line in enumerate(lines)}
    what, _, number = fail(raised).removesuffix(")").rpartition(":")
    assert what == f"raised ValueError: no number in the response ({HERE / FILE}"
    assert "line of the raise" in at[int(number)]
    assert fail(library).startswith("raised ValueError: invalid literal for int() with base 10: 'seven' (")
    assert "line of the library" in at[int(fail(library).removesuffix(")").rpartition(":")[2])]
    assert fail(left).startswith("raised SystemExit: 3 (")


def test_only_the_sample_that_hangs_fails() -> None:
    with pool_of(time_limit_s=1.0, processes=2) as pool:
        results = run(pool, *["fine"] * 20, "hang", *["fine"] * 20)
        assert pool.restarts == 1
    assert fail(results.pop(20)) == "took longer than 1 s; if it may, raise `reward.time_limit_s`"
    assert results == [ONE] * 40


def test_a_stopped_process_does_not_hold_up_the_pool() -> None:
    with pool_of(time_limit_s=1.0) as pool:
        results = run(pool, "stop", "fine")
        assert "took longer" in fail(results[0])
        assert results[1] == ONE
        run(pool, "fine")
        os.kill(pool.pids[0], signal.SIGSTOP)
        results = run(pool, "x" * 5_000_000, "fine")  # more than the line to it has room for
        assert "took longer" in fail(results[0])
        assert results[1] == ONE


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("exit", "ended its process, twice: it exited with 7"),
        ("crash", "ended its process, twice: it was killed by SIGSEGV"),
        ("whisper rubbish", "ended its process, twice: it left its line to us broken"),
        ("whisper strange", "ended its process, twice: it left its line to us broken"),
        ("close", "ended its process, twice: it "),
    ],
)
def test_only_the_sample_that_kills_its_process_fails(what: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distflow.reward.process._END_S", 0.3)
    with pool_of(processes=2) as pool:
        results = run(pool, *["fine"] * 20, what, *["fine"] * 20)
        assert pool.restarts == 2
    assert fail(results.pop(20)).startswith(message)
    assert results == [ONE] * 40


def test_half_a_message_is_waited_for_only_so_long() -> None:
    with pool_of(time_limit_s=1.0) as pool:
        half, fine = run(pool, "whisper half", "fine")
    assert "took longer" in fail(half)
    assert fine == ONE


def test_a_sample_is_not_to_blame_for_one_death(tmp_path: Path) -> None:
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

        found: list[Result] = []
        runner = threading.Thread(target=lambda: found.extend(run(pool, f"wait {tmp_path / 'pid'}", "fine")))
        runner.start()
        (busy,) = pids_in(tmp_path / "pid")
        os.kill(busy, signal.SIGKILL)
        runner.join()
        assert found == [ONE, ONE]
        assert pool.restarts == 2


@pytest.mark.parametrize("what", ["hang", "exit", "busy"])
def test_what_a_function_started_dies_with_its_process(tmp_path: Path, what: str) -> None:
    with pool_of(time_limit_s=60.0 if what == "exit" else 1.0) as pool:
        fail(run(pool, f"family {tmp_path / 'pids'} {what}")[0])
        for pid in pids_in(tmp_path / "pids"):
            wait_for(partial(gone, pid))


def test_close_leaves_nothing_behind(tmp_path: Path) -> None:
    before = children_of(os.getpid())
    with pool_of(processes=3) as pool:
        assert run(pool, f"family {tmp_path / 'pids'} live", "fine") == [ONE, ONE]
        family = pids_in(tmp_path / "pids")
        assert not any(map(gone, family))
        pids = pool.pids
    for pid in (*pids, *family):
        wait_for(partial(gone, pid))
    assert children_of(os.getpid()) <= before
    pool.close()  # twice does no harm


def test_a_run_that_is_closed_early_leaves_no_work_behind() -> None:
    with pool_of(processes=2) as pool:
        answers = pool.run([call("fine"), call("hang"), call("hang")])
        assert next(answers) == (0, [ONE])
        answers.close()
        assert run(pool, "fine", "fine", "number 3") == [ONE, ONE, Score(3.0, {})]


def test_order_is_kept_with_many_samples_and_processes() -> None:
    with pool_of(processes=4) as pool:
        for n in (1, 3, 500):
            assert run(pool, *[f"number {i}" for i in range(n)]) == [Score(float(i), {}) for i in range(n)]
        assert list(pool.run([])) == []


PARENT = """
import sys, threading, time
from pathlib import Path
from distflow.reward.function import RewardFunction
from distflow.reward.pool import Call, Pool

base, text, pids = sys.argv[1:]
pool = Pool([RewardFunction("user_rewards.py:behave")], 2, 1000.0, Path(base))
threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
list(pool.run([Call(0, {"data_source": "", "solution_str": "fine", "ground_truth": None})] * 2))
Path(pids + ".new").write_text(" ".join(map(str, pool.pids)))
Path(pids + ".new").rename(pids)
if text:
    list(pool.run([Call(0, {"data_source": "", "solution_str": text, "ground_truth": None})]))
time.sleep(1000)
"""


@pytest.mark.parametrize("what", ["", "hang", "busy"])
def test_no_child_outlives_its_parent(tmp_path: Path, what: str) -> None:
    text = f"family {tmp_path / 'family'} {what}" if what else ""
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(HERE), text, str(tmp_path / "pids")])
    try:
        pids = pids_in(tmp_path / "pids")
        assert len(pids) == 2
        pids += pids_in(tmp_path / "family") if what else []
        assert not any(map(gone, pids))
    finally:
        parent.kill()
        parent.wait()
    for pid in pids:
        wait_for(partial(gone, pid))


def test_processes_live_on_when_the_thread_that_started_them_ends() -> None:
    made: list[Pool] = []
    starter = threading.Thread(target=lambda: made.append(Pool([BEHAVE], 2, 60.0, HERE)))
    starter.start()
    starter.join()
    with closing(made[0]) as pool:
        assert run(pool, "fine", "fine") == [ONE, ONE]
        assert pool.restarts == 0


def test_functions_that_do_not_load_are_told(tmp_path: Path) -> None:
    def message(ref: str, **options: Any) -> str:
        with pool_of(RewardFunction(ref), **options) as pool, pytest.raises(RewardError) as e:
            _ = pool.signatures
        return str(e.value)

    assert "reward 'exacd': 'user_rewards.py:exacd' has no 'exacd'; did you mean 'exact'" in message(f"{FILE}:exacd")
    assert "there is no file" in message("nowhere.py:score")
    assert "reward 'unknown' (user_rewards.py:unknown): its parameters (text, answer)" in message(f"{FILE}:unknown")
    assert "is a int, not a function" in message(f"{FILE}:NOT_A_FUNCTION")
    (tmp_path / "leaves.py").write_text("import os\nos._exit(5)\n")
    assert "3 processes in a row ended while loading, the last one exited with 5" in message(
        f"{tmp_path}/leaves.py:score"
    )
    (tmp_path / "waits.py").write_text("import time\ntime.sleep(1000)\n")
    assert "did not load within 0.5 s" in message(f"{tmp_path}/waits.py:score", load_limit_s=0.5)


def test_data_that_cannot_be_sent_is_told() -> None:
    with pool_of() as pool:
        bad = Call(0, {"solution_str": "fine", "extra_info": {"day": date(2025, 1, 1)}})
        with pytest.raises(RewardError, match=r"reward 'behave': cannot be given 'extra_info' of the data: .*date"):
            list(pool.run([bad]))
        assert run(pool, "fine") == [ONE]
