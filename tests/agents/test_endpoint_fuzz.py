"""Calls that nobody would write, and agents that mix the APIs and hang up: sessions hold what was sampled."""

import copy
import http.client
import json
import random
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from agents.families import ADD, sampled, written
from agents.random_conversations import odd_text
from agents.scripted_loop import ScriptedLoop, scripted
from agents.test_endpoint import post
from distflow.agents import endpoint, endpoint_server
from distflow.agents.endpoint import EndpointCall

_FUNCTION: dict[str, Any] = {"name": "add", "arguments": '{"a": 1}'}
_CALL = {"id": "call00000", "type": "function", "function": _FUNCTION}
_RESULT = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "3"}]}
BODIES: dict[str, Any] = {
    "chat/completions": {
        "model": "m",
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "hello"}]},
            {"role": "assistant", "content": None, "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "call00000", "content": "3"},
        ],
        "tools": [ADD],
        "tool_choice": "auto",
        "max_tokens": 20,
        "stop": ["x"],
        "stream": False,
        "logprobs": True,
    },
    "responses": {
        "model": "m",
        "instructions": "s",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "so"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "adding"}]},
            {"type": "function_call", "call_id": "c", **_FUNCTION},
            {"type": "function_call_output", "call_id": "c", "output": "3"},
        ],
        "tools": [{"type": "function", "name": "add"}, {"type": "custom", "name": "patch"}],
        "include": ["reasoning.encrypted_content"],
        "max_output_tokens": 20,
        "stream": True,
        "previous_response_id": None,
    },
    "messages": {
        "model": "m",
        "max_tokens": 20,
        "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": "hello"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "so", "signature": ""},
                    {"type": "text", "text": "adding"},
                    {"type": "tool_use", "id": "t", "name": "add", "input": {"a": 1}},
                ],
            },
            {"role": "user", "content": [_RESULT, {"type": "text", "text": "and?"}]},
        ],
        "tools": [{"name": "add", "input_schema": {"type": "object"}}],
        "stop_sequences": ["x"],
        "stream": True,
    },
}
BODIES["messages/count_tokens"] = BODIES["messages"]
_URL = "data:image/png;base64,iVBORw0KGgo="
IMAGES = [{"type": "image_url", "image_url": {"url": _URL}}, {"type": "input_image", "image_url": _URL}]
VALUES: list[Any] = [None, True, 0, -1, 10**30, 1.5, "", "x", "\ud800", "assistant", [], [None], [[]], {}, {"type": 3}]
VALUES += [[image] for image in IMAGES]


def places(value: Any) -> list[tuple[Any, Any]]:
    """Returns every (container, key) within a body."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, inner in items for place in ((value, key), *places(inner))]


@pytest.mark.parametrize("path", BODIES)
def test_bodies_that_nobody_would_write(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is answered or refused; the loop of the worker does not fail, and nothing is sampled that was not."""
    monkeypatch.setattr(endpoint_server, "REFUSAL_S", 0.0)
    monkeypatch.setattr(endpoint, "MAX_REFUSED", 10**6)
    rng, answered, refused = random.Random(path), 0, 0
    with scripted(written("qwen", "four", [{"name": "add", "arguments": {}}])) as loop:
        for key in range(150):
            loop.open(key)
            for changes in (0, rng.choice([1, 1, 1, 2, 4])):  # the second call is matched with the first
                body = copy.deepcopy(BODIES[path])
                for _ in range(changes):
                    container, where = rng.choice(places(body))
                    if rng.random() < 0.3 and isinstance(container, dict):
                        del container[where]
                    else:
                        container[where] = copy.deepcopy(rng.choice([*VALUES, odd_text(rng)]))
                connection = http.client.HTTPConnection(loop.endpoint.url.removeprefix("http://"), timeout=60)
                to = path if changes else path.removesuffix("/count_tokens")
                connection.request("POST", f"/v1/{to}", json.dumps(body), {"x-api-key": loop.keys[key]})
                reply = connection.getresponse()
                said = reply.read()
                connection.close()
                assert reply.status in (200, 400, 404), (body, said)
                assert reply.status == 200 or b'"message"' in said
                answered, refused = answered + (reply.status == 200), refused + (reply.status != 200)
                check(loop, key, [])
            loop.endpoint.close(key)
    assert min(answered, refused) > 20


def check(loop: ScriptedLoop, key: int, said: list[str]) -> None:
    """What is marked as sampled is what the model said in this session, turn for turn."""
    turns = 0
    for branch in loop.sessions[key].branches:
        ours = [i for i, mask in enumerate(branch.mask) if mask]
        assert ours == [i for t in branch.turns for i in range(t.start, t.start + t.length)]
        assert len(branch.tokens) == len(branch.mask) == len(branch.logprobs)
        for turn in branch.own_turns:
            turns += 1
            if said:
                assert branch.tokens[turn.start : turn.start + turn.length] in [sampled("qwen", s) for s in said]
    assert turns == loop.sessions[key].generations


def test_agents_that_mix_apis_and_hang_up_get_their_own_session() -> None:
    """Eight at once, each with a history of its own in the form of one API after the other."""

    def say(call: EndpointCall) -> str:
        return f"<think>{call.key}</think>this is session {call.key}"

    def hang_up(key: int) -> None:
        """Sends a call, and is gone before the reply."""
        body = json.dumps({"model": "m", "max_tokens": 99, "messages": [{"role": "user", "content": "gone"}]}).encode()
        address = ("127.0.0.1", int(loop.endpoint.url.rpartition(":")[2]))
        head = f"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nx-api-key: {loop.keys[key]}\r\n"
        with socket.create_connection(address) as sock:
            sock.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)

    def talk(key: int) -> list[str]:
        texts, rng = ["hello"], random.Random(key)
        for turn in range(6):
            roles = [("user", "assistant")[i % 2] for i in range(len(texts))]
            messages = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=True)]
            path = ("chat/completions", "responses", "messages")[(key + turn) % 3]
            field = "input" if path == "responses" else "messages"
            url = f"{loop.endpoint.url}/s/{[key, loop.keys[key]][turn % 2]}/v1/{path}"
            if rng.random() < 0.3:
                hang_up(key)
            status, reply = post(url, {"model": "m", "max_tokens": 99, field: messages}, loop.keys[key])
            assert status == 200, reply
            if path == "responses":
                answer = reply["output"][-1]["content"][0]["text"]
            elif path == "messages":
                answer = reply["content"][-1]["text"]
            else:
                answer = reply["choices"][0]["message"]["content"].partition("</think>")[2]
            assert answer == f"this is session {key}"
            texts += [answer, rng.choice(["go on", odd_text(rng) or "x"])]
        return texts

    with scripted(say) as loop:
        for key in range(8):
            loop.open(key)
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(talk, range(8)))
    for key in range(8):
        check(loop, key, [f"<think>{key}</think>this is session {key}"])
        assert max(len(b.turns) for b in loop.sessions[key].branches) == 6
