"""An environment that hangs, crashes, floods or forks costs its own conversation, is named, and disturbs no other."""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from agents.fake_model import Conversation, converse, start_message
from distflow.agents.env_pool import EnvPool
from distflow.agents.spec import EnvironmentSpec
from limits import load_factor, wait_until

BASE = Path(__file__).parent
CALL = '<tool_call>{"name": "add", "arguments": {"step": 2}}</tool_call>'
SAY = [CALL, CALL, "done"]
LIMIT_S = round(10 * load_factor())
LATE = f"took longer than {LIMIT_S} s; raise `environment.time_limit_s`"
RAISED = r"raised RuntimeError: the server is on fire \(.*hostile.py:\d+\)"
FAULTS = {
    ("hang", "reset"): LATE,
    ("hang", "add"): LATE,
    ("hang", "get_reward"): LATE,
    ("flood_rewards", "add"): LATE,
    ("raise", "reset"): RAISED,
    ("raise", "get_reward"): RAISED,
    ("leave", "add"): r"raised SystemExit: 3 \(.*hostile.py:\d+\)",
    ("exit", "reset"): "ended its process: it exited with 7",
    ("exit", "add"): "ended its process: it exited with 7",
    ("crash", "add"): "ended its process: it was killed by SIGSEGV",
    ("huge", "reset"): r"gave 100,\d+,\d+ bytes at once; at most 8 MiB",
    ("huge", "add"): r"gave 100,\d+,\d+ bytes at once; at most 8 MiB",
    ("huge", "get_reward"): r"gave 'x+… \(str\) as a reward; give a number",
    ("object", "get_reward"): r"gave <object object .*> \(object\) as a reward; give a number",
    ("nan", "get_reward"): "gave nan as a reward; give a finite number",
    ("garbage", "add"): "wrote to the channel of its process",
    ("flood", "add"): "sent a message above 8 MiB; return less text at once",
    ("close", "add"): "closed the channel of its process",
    ("close_everything", "add"): "ended its process|closed the channel",
}


@pytest.fixture(scope="module")
def pool() -> Iterator[EnvPool]:
    environments = [EnvironmentSpec("bad", "hostile.py:Bad"), EnvironmentSpec("good", "hostile.py:Good")]
    pool = EnvPool(environments, BASE, time_limit_s=LIMIT_S)
    pool.describe()
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def together(pool: EnvPool) -> dict[tuple[str, str], Conversation]:
    """All faults at once, each beside a conversation in which nothing goes wrong."""
    rows = [
        {"what": what, "at": at} for pair in zip(FAULTS, [("none", "")] * len(FAULTS), strict=True) for what, at in pair
    ]
    return _converse(pool, rows)


def _converse(pool: EnvPool, rows: list[dict[str, str]]) -> dict[tuple[str, str], Conversation]:
    template, restarts = pool.pids, pool.restarts
    conversations = converse(pool, [start_message(r, sample_id=i) for i, r in enumerate(rows)], SAY)
    assert (pool.pids, pool.restarts) == (template, restarts)
    for row, conversation in zip(rows, conversations, strict=True):
        if row["what"] == "none":
            assert conversation.failure is None
            assert conversation.result
            assert conversation.result["reward"] == 4.0
            assert conversation.roles == ["user", "assistant", "tool", "assistant", "tool", "assistant"]
    return {(row["what"], row["at"]): conversation for row, conversation in zip(rows, conversations, strict=True)}


@pytest.mark.parametrize(("what", "at"), FAULTS)
def test_it_costs_its_own_conversation(together: dict[tuple[str, str], Conversation], what: str, at: str) -> None:
    bad = together[what, at]
    assert bad.result is None
    assert bad.failure is not None
    assert re.search(FAULTS[what, at], bad.failure), bad.failure


def test_a_tool_that_raises_is_told_to_the_model(pool: EnvPool) -> None:
    bad = _converse(pool, [{"what": "raise", "at": "add"}])["raise", "add"]
    assert bad.failure is None
    assert [m["content"] for m in bad.messages if m["role"] == "tool"] == ["{'error': 'the server is on fire'}"] * 2
    assert bad.result
    assert bad.result["metrics"] == {"tool_calls": 2, "tool_errors": 2}


def test_a_fork_that_comes_back_does_not_speak(pool: EnvPool) -> None:
    bad = _converse(pool, [{"what": "fork", "at": "add"}, {"what": "none", "at": ""}])["fork", "add"]
    assert bad.failure is None
    assert bad.result
    assert bad.result["reward"] == 4.0
    assert bad.roles.count("tool") == 2


def test_what_an_environment_started_ends_with_it(pool: EnvPool, tmp_path: Path) -> None:
    note = tmp_path / "pids"
    row = {"what": "start_processes", "at": "add", "note": str(note)}
    assert _converse(pool, [row])["start_processes", "add"].failure is None
    pids = list(map(int, note.read_text().split()))
    assert len(pids) == 3
    _wait_for_end(pool, pids)


def test_a_template_that_dies_is_replaced(pool: EnvPool) -> None:
    (template,), restarts = pool.pids, pool.restarts
    (bad,) = converse(pool, [start_message({"what": "kill_parent", "at": "add"})], SAY)
    assert bad.failure is not None
    assert "lost the process it was forked from, which was killed by SIGKILL" in bad.failure
    assert pool.pids != [template]
    assert pool.restarts == restarts + 1
    (good,) = converse(pool, [start_message()], SAY)
    assert good.result


def test_a_fork_of_the_worker_keeps_no_conversation_alive(pool: EnvPool, tmp_path: Path) -> None:
    """A fork has the worker's descriptors, with that whose closing kills the process of a conversation."""
    pool.start(7, 0, start_message({"what": "note_and_hang", "at": "reset", "note": str(tmp_path / "pid")}))
    note = tmp_path / "pid"
    wait_until(lambda: pool.poll(0.1) or (note.exists() and note.read_text()))
    (pid,) = map(int, note.read_text().split())
    fork = os.fork()
    if fork == 0:
        signal.pause()
    try:
        pool.kill(7)
        _wait_for_end(pool, [pid])
    finally:
        os.kill(fork, signal.SIGKILL)
        os.waitpid(fork, 0)


def test_everything_ends_with_the_worker(tmp_path: Path) -> None:
    note = tmp_path / "pids"
    reading, writing = os.pipe()
    worker = os.fork()
    if worker == 0:  # a worker that dies while a conversation hangs
        try:
            pool = EnvPool([EnvironmentSpec("bad", "hostile.py:Bad")], BASE, time_limit_s=600)
            pool.describe()
            row = {"what": "start_processes", "at": "add", "note": str(note)}
            converse(pool, [start_message(row)], [CALL])
            pool.start(1, 0, start_message({"what": "hang", "at": "reset"}))
            pool.start(2, 0, start_message())
            while not any(e.key == 2 for e in pool.poll(1.0)):
                pass
            os.write(writing, str(pool.pids[0]).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading) as pipe:
        template = int(pipe.read())
    os.waitpid(worker, 0)
    pids = [template, *map(int, note.read_text().split())]
    wait_until(lambda: not _in_session_of(template) and not any(map(_runs, pids)))


def _wait_for_end(pool: EnvPool, pids: list[int]) -> None:
    def ended() -> bool:
        pool.poll(0.1)
        return not any(map(_runs, pids))

    wait_until(ended)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def _in_session_of(pid: int) -> list[int]:
    """Processes of a session that still run, and children of its leader."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent, _, session, *_ = path.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if state != "Z" and str(pid) in (parent, session):
            found.append(int(path.parent.name))
    return found
