"""The processes of a worker's conversations: clocks, keys, templates, seeds."""

import math
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from agents.fake_model import Conversation, answer, converse, start_message
from distflow.agents.env_pool import EnvPool, check_message
from distflow.agents.spec import EnvironmentSetupError, EnvironmentSpec
from distflow.userproc.channel import BrokenChannelError
from distflow.userproc.processes import Event, Failed, Message
from limits import TimeLimit, wait_until

BASE = Path(__file__).parent
CALL = '<tool_call>{"name": "add", "arguments": {"step": 2}}</tool_call>'
GOOD = EnvironmentSpec("good", "hostile.py:Good")


@contextmanager
def made(*specs: EnvironmentSpec, base: Path = BASE, **options: Any) -> Iterator[EnvPool]:
    pool = EnvPool(specs, base, **options)
    try:
        yield pool
    finally:
        pool.close()


@pytest.fixture(scope="module")
def pool() -> Iterator[EnvPool]:
    with made(GOOD, EnvironmentSpec("chance", "hostile.py:Chance"), time_limit_s=60) as pool:
        pool.describe()
        yield pool


def wait(pool: EnvPool, key: int) -> Event:
    """Returns the next event of a conversation."""
    limit = TimeLimit(60)
    while limit.left() > 0:
        for event in pool.poll(1.0):
            if event.key == key:
                return event
    raise AssertionError(f"nothing of conversation {key} within {limit}")


def test_a_child_has_no_deadline_while_it_waits_for_the_model(pool: EnvPool) -> None:
    pool.start(0, 0, start_message())
    assert pool._next_deadline() < math.inf
    conversation = Conversation()
    event = wait(pool, 0)
    assert pool._next_deadline() == math.inf  # it has asked, and we owe the answer
    answer(pool, event, conversation, ["done"])
    assert pool._next_deadline() < math.inf
    while conversation.result is None:
        assert conversation.failure is None
        answer(pool, wait(pool, 0), conversation, ["done"])


def test_a_paused_child_works_on_and_is_heard_later(pool: EnvPool) -> None:
    """Its clock stands still, and what it says, or how it ends, is an event when it is resumed."""
    pool.start(0, 0, start_message())
    pool.pause(0)
    pool.pause(0)
    assert pool._next_deadline() == math.inf
    pool.start(1, 0, start_message())
    assert isinstance(wait(pool, 1), Message)
    assert pool.poll(0.5) == []
    assert not pool.has_events()
    assert pool.resume(0)
    conversation = Conversation()
    answer(pool, wait(pool, 0), conversation, ["done"])
    while conversation.result is None:
        pool.pause(0)
        pool.resume(0)
        answer(pool, wait(pool, 0), conversation, ["done"])
    pool.kill(1)
    assert not pool.resume(1)


def test_a_child_that_ended_while_it_was_paused_has_failed() -> None:
    with made(EnvironmentSpec("bad", "hostile.py:Bad", time_limit_s=30)) as pool:
        pool.describe()
        pool.start(0, 0, start_message({"what": "exit", "at": "reset"}))
        pool.pause(0)
        assert pool.poll(2.0) == []
        assert pool.resume(0)
        event = wait(pool, 0)
        assert isinstance(event, Failed)
        assert "ended its process" in event.reason


def test_the_clock_of_a_child_stops_while_the_endpoint_works_for_it() -> None:
    spec = EnvironmentSpec("bad", "hostile.py:Bad", time_limit_s=1)
    with made(spec) as pool:
        pool.describe()
        pool.hold(0)  # no such conversation: nothing happens
        pool.start(0, 0, start_message({"what": "hang", "at": "reset"}))
        pool.hold(0)
        pool.hold(0)
        pool.release(0)
        assert pool.poll(2.0) == []
        pool.release(0)
        event = wait(pool, 0)
        assert isinstance(event, Failed)
        assert "took longer than 1 s" in event.reason


def test_a_conversation_may_start_before_the_environments_are_loaded() -> None:
    with made(GOOD) as pool:
        (conversation,) = converse(pool, [start_message()], [CALL, "done"])
        assert conversation.result
        assert conversation.result["reward"] == 2.0


def test_a_killed_child_is_silent_and_its_key_free(pool: EnvPool) -> None:
    pool.start(5, 0, start_message())
    wait(pool, 5)
    pool.kill(5)
    pool.kill(5)
    pool.send(5, {"branch": 0})
    assert not [e for e in pool.poll(0.5) if e.key == 5]
    pool.start(5, 0, start_message())
    assert isinstance(wait(pool, 5), Message)
    pool.kill(5)


def test_events_are_seen_without_waiting() -> None:
    with made(GOOD) as pool:
        pool.describe()
        assert not pool.has_events()
        pool.start(0, 0, start_message())
        wait_until(pool.has_events)
        wait_until(lambda: pool.poll(0))


def test_chance_is_a_function_of_the_sample(pool: EnvPool) -> None:
    """Processes are forks of one process, and draw different numbers all the same, on every worker the same ones."""
    starts = [start_message(sample_id=i) for i in (1, 2, 3)]
    for _ in range(2):
        said = [c.messages[0]["content"] for c in converse(pool, starts, ["done"], environment=1)]
        assert said == [f"Go. {random.Random(i).random()}" for i in (1, 2, 3)]


def test_an_interpreter_of_another_virtual_environment(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexport ELSEWHERE=1\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    specs = GOOD, EnvironmentSpec("elsewhere", "hostile.py:Elsewhere", python=str(python))
    with made(*specs) as pool:
        assert len(pool.describe()) == len(pool.pids) == 2
        here, elsewhere = (converse(pool, [start_message()], ["done"], i)[0] for i in (0, 1))
        assert here.messages[0]["content"] == "Go. Count."
        assert elsewhere.messages[0]["content"] == "Go. 1"


def test_an_import_that_hangs_is_named(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(3600)\n")
    with (
        made(EnvironmentSpec("slow", "slow.py:Env"), base=tmp_path, load_limit_s=3) as pool,
        pytest.raises(EnvironmentSetupError, match=r"environment 'slow' \(slow.py:Env\) did not load within 3 s"),
    ):
        pool.describe()


def test_an_import_that_ends_the_process_is_named(tmp_path: Path) -> None:
    (tmp_path / "gone.py").write_text("import os\nos._exit(9)\n")
    with (
        made(EnvironmentSpec("gone", "gone.py:Env"), base=tmp_path) as pool,
        pytest.raises(EnvironmentSetupError, match="3 processes died while loading, the last one exited with 9"),
    ):
        pool.describe()


@pytest.mark.parametrize(
    "message",
    [None, 7, [], {}, {"op": "turn"}, {"op": "turn", "messages": "x"}, {"op": "done"}, {"op": ["done"]}],
)
def test_what_is_no_message_is_refused(message: Any) -> None:
    with pytest.raises(BrokenChannelError):
        check_message(message)
