"""Tools of MCP servers, called by a model that says what is written here."""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from agents.fake_model import Conversation, converse, start_message
from distflow.agents.env_pool import EnvPool
from distflow.agents.spec import EnvironmentSetupError, EnvironmentSpec

pytest.importorskip("mcp", reason="the extra `mcp` is not installed here")

BASE = Path(__file__).parent
COMMAND = [sys.executable, str(BASE / "mcp_server.py")]


def spec(name: str, *words: str, time_limit_s: float = 60.0, **rest: Any) -> EnvironmentSpec:
    return EnvironmentSpec(
        name, mcp={name: {"command": [*COMMAND, *words], "url": None}}, time_limit_s=time_limit_s, **rest
    )


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@pytest.fixture(scope="module")
def pool() -> Iterator[EnvPool]:
    specs = [spec("counter"), spec("short", time_limit_s=10.0), spec("both", tools=["user_environments.py:multiply"])]
    pool = EnvPool(specs, BASE)
    yield pool
    pool.close()


def play(pool: EnvPool, environment: int, *say: str, starts: int = 1) -> list[Conversation]:
    return converse(pool, [start_message(sample_id=i) for i in range(starts)], list(say), environment)


def told(conversation: Conversation) -> list[str]:
    return [m["content"] for m in conversation.messages if m["role"] == "tool"]


def test_tools_of_a_server_are_the_models(pool: EnvPool) -> None:
    described = pool.describe()
    names = [[t["function"]["name"] for t in d.tools[""]] for d in described]
    assert names == [["add", "fail", "crash", "hang"]] * 2 + [["multiply", "add", "fail", "crash", "hang"]]
    schema = described[0].tools[""][0]["function"]
    assert (schema["description"], schema["parameters"]["required"]) == ("Adds to the counter.", ["amount"])


def test_every_conversation_has_a_server_of_its_own(pool: EnvPool) -> None:
    for conversation in play(pool, 0, call("add", amount=2), call("add", amount=3), "done", starts=2):
        assert conversation.failure is None
        assert told(conversation) == ["now at 2", "now at 5"]


def test_functions_are_tools_beside_those_of_a_server(pool: EnvPool) -> None:
    (conversation,) = play(pool, 2, call("multiply", a=2, b=3) + call("add", amount=1), "done")
    assert told(conversation) == ["6", "now at 1"]


def test_the_model_is_told_of_its_own_mistakes(pool: EnvPool) -> None:
    (conversation,) = play(pool, 0, call("fail"), call("add", amount="x"), call("subtract"), "done")
    failed, wrong, unknown = told(conversation)
    assert "Error executing tool fail" in failed
    assert "amount" in wrong
    assert "there is no tool 'subtract'" in unknown
    assert conversation.result is not None
    assert conversation.result["metrics"] == {"tool_calls": 3, "tool_errors": 3}


@pytest.mark.parametrize(
    ("environment", "tool", "reason"),
    [
        (0, "crash", "had trouble with its MCP server 'counter'"),
        (1, "hang", "waited longer than 8 s for its MCP server 'short'"),
    ],
)
def test_a_server_that_fails_costs_the_sample_and_is_named(
    pool: EnvPool, environment: int, tool: str, reason: str
) -> None:
    (conversation,) = play(pool, environment, call(tool))
    assert conversation.failure is not None
    assert conversation.failure.startswith(reason)


def test_a_url_is_a_server_for_all() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as probe:
        port = probe.getsockname()[1]
    process = subprocess.Popen([*COMMAND, "http", str(port)])
    try:
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert process.poll() is None
            time.sleep(0.05)
        server = {"command": [], "url": f"http://127.0.0.1:{port}/mcp"}
        pool = EnvPool([EnvironmentSpec("url", mcp={"url": server}, time_limit_s=60)], BASE)
        with closing(pool):
            assert told(play(pool, 0, call("add", amount=1), "done")[0]) == ["now at 1"]
            assert told(play(pool, 0, call("add", amount=1), "done")[0]) == ["now at 2"]
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        (spec("silent", "garbage", time_limit_s=5.0), "waited longer than 4 s for its MCP server 'silent'"),
        (EnvironmentSpec("gone", mcp={"gone": {"command": ["/no/such/server"]}}), "trouble with its MCP server 'gone'"),
        (
            spec("other", call="user_environments.py:Guess"),
            "of the kinds 'tools', 'trl', and this is of 'skyrl'; remove it",
        ),
    ],
)
def test_a_server_that_cannot_work_is_said_before_the_first_step(environment: EnvironmentSpec, words: str) -> None:
    with closing(EnvPool([environment], BASE)) as pool, pytest.raises(EnvironmentSetupError, match=words):
        pool.describe()
