"""The endpoint: whichever client calls it, the session holds exactly the tokens that were sampled."""

import json
import os
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any

import openai
import pytest

from agents.families import ADD, sampled, tokenizer, written
from agents.scripted_loop import ScriptedLoop, scripted
from distflow.agents import endpoint_server
from distflow.agents.endpoint import MAX_REFUSED, Endpoint, EndpointCall
from distflow.agents.protocols.call import cut_at_stop
from distflow.agents.session import ConversationLimits
from distflow.errors import ConfigError
from limits import load_factor

TOOLS: Any = [ADD]
HELLO: Any = [{"role": "user", "content": "hello"}]


def client(loop: ScriptedLoop, key: int = 0) -> openai.OpenAI:
    return openai.OpenAI(base_url=loop.endpoint.base_url, api_key=loop.keys.get(key) or loop.open(key), max_retries=0)


def post(url: str, body: Any, key: str = "", **headers: str) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Authorization": f"Bearer {key}", **headers})
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, json.loads(reply.read())
    except urllib.error.HTTPError as e:
        text = e.read()
        return e.code, json.loads(text) if text.startswith(b"{") else text


def test_the_openai_client_chats_and_the_session_has_what_was_sampled() -> None:
    with scripted("  four\n") as loop:
        reply = client(loop).chat.completions.create(
            model="any", messages=[{"role": "user", "content": "2 + 2?"}], logprobs=True, temperature=0.3
        )
        [branch] = loop.sessions[0].branches
    choice = reply.choices[0]
    assert (choice.message.content, choice.finish_reason, reply.model) == ("  four\n", "stop", "any")
    assert reply.system_fingerprint == "weights-7"
    tokens = sampled("qwen", "  four\n")
    assert (branch.tokens, branch.mask, branch.logprobs) == (tokens, [True] * len(tokens), [-0.5] * len(tokens))
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (len(branch.prompt), len(tokens))
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert [p.logprob for p in choice.logprobs.content] == [-0.5] * len(tokens)


def test_a_conversation_goes_on_in_one_branch() -> None:
    messages: list[Any] = list(HELLO)
    with scripted() as loop:
        for _ in range(3):
            reply = client(loop).chat.completions.create(model="m", messages=messages)
            messages += [reply.choices[0].message, {"role": "user", "content": "and?"}]
        [branch] = loop.sessions[0].branches
    assert len(branch.turns) == 3
    assert [t for t, ours in zip(branch.tokens, branch.mask, strict=True) if ours] == 3 * sampled("qwen", "four")


def test_tool_calls_come_as_the_client_knows_them_and_go_back() -> None:
    call = {"name": "add", "arguments": {"a": 1, "b": 2}}

    def say(request: EndpointCall) -> str:
        messages = request.body.messages or []
        return written("qwen", "adding", [call]) if messages[-1]["role"] == "user" else "3"

    with scripted(say) as loop:
        messages: list[Any] = [{"role": "developer", "content": "add"}, *HELLO]
        first = client(loop).chat.completions.create(model="m", messages=messages, tools=TOOLS)
        [asked] = first.choices[0].message.tool_calls or []
        assert first.choices[0].finish_reason == "tool_calls"
        assert asked.type == "function"
        assert (asked.function.name, json.loads(asked.function.arguments)) == ("add", call["arguments"])
        messages += [first.choices[0].message, {"role": "tool", "tool_call_id": asked.id, "content": "3"}]
        last = client(loop).chat.completions.create(model="m", messages=messages, tools=TOOLS)
        [branch] = loop.sessions[0].branches
    assert last.choices[0].message.content == "3"
    assert [m["role"] for m in branch.messages] == ["system", "user", "assistant", "tool", "assistant"]


def test_a_malformed_tool_call_is_shown_to_the_agent_and_the_branch_goes_on() -> None:
    with scripted('<tool_call>{"name": add}</tool_call>') as loop:
        messages: list[Any] = list(HELLO)
        for _ in range(2):
            reply = client(loop).chat.completions.create(model="m", messages=messages, tools=TOOLS)
            message = reply.choices[0].message
            assert (message.tool_calls, message.content) == (None, '<tool_call>{"name": add}</tool_call>')
            messages += [message, {"role": "user", "content": "that is no JSON"}]
        [branch] = loop.sessions[0].branches
    assert len(branch.turns) == 2


@pytest.mark.parametrize("usage", [False, True])
def test_streams(usage: bool) -> None:
    with scripted(written("qwen", "so", [{"name": "add", "arguments": {"a": 1}}])) as loop:
        options: dict[str, Any] = {"stream_options": {"include_usage": True}} if usage else {}
        stream = client(loop).chat.completions.create(
            model="m",
            messages=HELLO,
            tools=TOOLS,
            stream=True,
            **options,
        )
        chunks = list(stream)
    deltas = [c.choices[0].delta for c in chunks if c.choices]
    assert "".join(d.content or "" for d in deltas).strip() == "so"
    [call] = [c for d in deltas for c in d.tool_calls or []]
    assert call.function is not None
    assert (call.function.name, call.function.arguments) == ("add", '{"a": 1}')
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "tool_calls"
    assert (chunks[-1].usage is not None) == usage


def test_completions_go_on_from_text() -> None:
    with scripted("four") as loop:
        models = client(loop).models.list()
        assert [m.id for m in models] == ["tiny"]
        first = client(loop).completions.create(model="m", prompt="2 + 2 = ", logprobs=1)
        text = "2 + 2 = four<|im_end|>\nAnd 3 + 3 = "
        stream = client(loop).completions.create(model="m", prompt=text, stream=True)
        assert "".join(c.choices[0].text for c in stream) == "four"
        [branch] = loop.sessions[0].branches
    assert first.choices[0].text == "four"
    assert first.choices[0].logprobs is not None
    assert len(first.choices[0].logprobs.tokens or []) == len(sampled("qwen", "four"))
    assert len(branch.turns) == 2


def test_tokens_in_and_out() -> None:
    with scripted("four") as loop:
        key = loop.open(0)
        url = f"{loop.endpoint.url}/inference/v1/generate"
        prompt = sampled("qwen", "2 + 2 = ", finished=False)
        body = {"model": "m", "token_ids": prompt, "sampling_params": {"max_tokens": 2, "logprobs": 1, "n": 1}}
        status, reply = post(url, body, key)
        assert status == 200
        [choice] = reply["choices"]
        assert (choice["token_ids"], choice["finish_reason"]) == (sampled("qwen", "four")[:2], "length")
        assert choice["logprobs"]["content"][0]["token"] == f"token_id:{choice['token_ids'][0]}"
        assert [p["logprob"] for p in choice["logprobs"]["content"]] == [-0.5, -0.5]
        body["token_ids"] = [*prompt, *choice["token_ids"], *sampled("qwen", " what", finished=False)]
        assert post(url, body, key)[0] == 200
        [branch] = loop.sessions[0].branches
        assert len(branch.turns) == 2
        body["token_ids"] = [len(tokenizer("qwen"))]
        status, reply = post(url, body, key)
        assert status == 400
        assert "token_ids" in reply["error"]["message"]


def test_a_stop_string_ends_a_turn_and_nothing_behind_it_is_recorded() -> None:
    with scripted("a thought. Observation: made up") as loop:
        messages: list[Any] = list(HELLO)
        for _ in range(2):
            reply = client(loop).chat.completions.create(model="m", messages=messages, stop=["Observation:"])
            messages += [reply.choices[0].message, {"role": "user", "content": "go on"}]
        [branch] = loop.sessions[0].branches
    assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == ("a thought. ", "stop")
    text = loop.renderer.decode(branch.tokens[: branch.turns[0].length])
    assert "Observation:" in text
    assert "made" not in text
    assert len(branch.turns) == 2


def test_cut_at_stop_keeps_the_token_that_completes_the_string() -> None:
    def decode(tokens: Sequence[int]) -> str:
        return "".join(["ab", "c", "d"][t] for t in tokens)

    assert cut_at_stop([0, 1, 2], ("bc",), decode) == (2, True)
    assert cut_at_stop([0, 1, 2], ("x", "d"), decode) == (3, True)
    assert cut_at_stop([0, 1, 2], ("x",), decode) == (3, False)


def test_sessions_are_apart() -> None:
    """Calls of many sessions at once: each is recorded in its own, whether its key or its URL names it."""

    def say(call: EndpointCall) -> str:
        return f"answer {call.key}"

    def ask(key: int) -> str | None:
        own = loop.keys[key]
        url, sent = [
            (loop.endpoint.base_url, own),
            (loop.endpoint.session_url(key), own),
            (f"{loop.endpoint.url}/s/{own}/v1", "EMPTY"),
        ][key % 3]
        agent = openai.OpenAI(base_url=url, api_key=sent, max_retries=0)
        messages: list[Any] = [{"role": "user", "content": str(key)}]
        for _ in range(2):
            reply = agent.chat.completions.create(model="m", messages=messages)
            messages += [reply.choices[0].message, {"role": "user", "content": "again"}]
        return reply.choices[0].message.content

    with scripted(say) as loop:
        for key in range(8):
            loop.open(key)
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(ask, range(8))) == [f"answer {key}" for key in range(8)]
    assert all(len(s.branches) == 1 and len(s.branches[0].turns) == 2 for s in loop.sessions.values())


def test_only_the_key_of_a_session_is_served(caplog: pytest.LogCaptureFixture) -> None:
    with scripted() as loop:
        one, other = loop.open(1, sample_id=101), loop.open(2, sample_id=102)
        body = {"messages": HELLO}
        chat = f"{loop.endpoint.base_url}/chat/completions"
        for key in ("", "sk-wrong", one[:-1]):
            status, reply = post(chat, body, key)
            assert (status, reply["error"]["code"]) == (401, "invalid_api_key")
        assert post(f"{loop.endpoint.url}/s/sk-wrong/v1/chat/completions", body)[0] == 401
        status, reply = post(f"{loop.endpoint.session_url(1)}/chat/completions", body, other)
        assert (status, "not that of sample 101" in reply["error"]["message"]) == (403, True)
        assert not loop.sessions[1].branches
        assert not loop.sessions[2].branches
        assert post(chat, body, one)[0] == 200
        assert post(f"{loop.endpoint.session_url(1)}/chat/completions", body, one)[0] == 200
        assert loop.endpoint.counts["unauthorized"] == 5
    assert "a call to the session of sample 101 had the key of sample 102" in caplog.text


@pytest.mark.parametrize(
    ("host", "reached"), [("127.0.0.2", "127.0.0.2"), ("::1", "[::1]"), ("localhost", "127.0.0.1"), ("0.0.0.0", None)]
)
def test_an_endpoint_on_another_address_gives_a_url_that_reaches_it(host: str, reached: str | None) -> None:
    with scripted(host=host) as loop:
        key, (address, port) = loop.open(1), loop.endpoint.url.removeprefix("http://").rsplit(":", 1)
        assert address == reached if reached else address not in ("", "0.0.0.0")
        chat = f"{loop.endpoint.session_url(1)}/chat/completions"
        assert post(chat, {"messages": HELLO})[0] == 401
        assert post(chat, {"messages": HELLO}, key)[0] == 200
        if host != "0.0.0.0":
            with pytest.raises(OSError):  # noqa: PT011 - refused: it listens nowhere else
                socket.create_connection(("127.0.0.3", int(port)), timeout=5)


@pytest.mark.parametrize("host", ["203.0.113.9", "no such host"])
def test_an_address_of_another_host_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match=rf"endpoint_host: .* cannot listen on '{host}': .*; give an address of this"):
        Endpoint("tiny", 100, host=host)


def test_a_call_after_the_sample_ended_is_refused_by_its_id() -> None:
    with scripted() as loop:
        key = loop.open(1, sample_id=101)
        loop.endpoint.close(1)
        status, reply = post(f"{loop.endpoint.base_url}/chat/completions", {"messages": HELLO}, key)
    assert (status, reply["error"]["message"]) == (410, "sample 101 has ended: its session is closed")
    assert loop.endpoint.counts["late"] == 1


def test_a_call_that_waits_when_its_sample_ends_is_answered() -> None:
    endpoint = Endpoint("tiny", 100)
    try:
        key = endpoint.open(1, 101)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(post, f"{endpoint.base_url}/chat/completions", {"messages": HELLO}, key)
            while not endpoint.has_events({1}):
                pass
            endpoint.close(1)
            assert endpoint.poll({1}) == []
            assert waiting.result()[0] == 410
    finally:
        endpoint.stop()


def test_limits_of_the_session_end_it_without_retries() -> None:
    with scripted(limits=ConversationLimits(1, 3000)) as loop:
        agent = openai.OpenAI(base_url=loop.endpoint.base_url, api_key=loop.open(0, sample_id=17))
        agent.chat.completions.create(model="m", messages=HELLO)
        with pytest.raises(openai.BadRequestError, match=r"sample 17 has reached its limit environment\.max_turns"):
            agent.chat.completions.create(model="m", messages=HELLO)
    assert loop.endpoint.counts["calls"] == 2


def test_slow_connections_lock_no_agent_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither one that comes later, nor one whose call waits for the model."""
    monkeypatch.setattr(endpoint_server, "MAX_CONNECTIONS", 40)
    hold = threading.Event()

    def say(call: EndpointCall) -> str:
        if call.key == 1:
            assert hold.wait(60 * load_factor())
        return "four"

    with scripted(say) as loop, ThreadPoolExecutor(1) as pool, ExitStack() as stack:
        chat, key = f"{loop.endpoint.base_url}/chat/completions", loop.open(1, sample_id=101)
        waiting = pool.submit(post, chat, {"messages": HELLO}, key)
        while not loop.endpoint.counts["calls"]:
            pass
        address = ("127.0.0.1", int(loop.endpoint.url.rpartition(":")[2]))

        def connect_slowly() -> None:
            for i in range(100):
                sock = stack.enter_context(socket.create_connection(address))
                with suppress(ConnectionError):
                    sock.sendall([b"", b"POST /v1/chat/completions HTTP/1.1\r\nX: "][i % 2])

        connect_slowly()
        hold.set()
        assert waiting.result()[0] == 200
        connect_slowly()
        other = client(loop, 2).chat.completions.create(model="m", messages=HELLO)
        assert other.choices[0].message.content == "four"


def test_a_flood_is_bounded_and_nobody_else_notices() -> None:
    """One session sends calls without waiting: few are taken, the rest is refused, then it is named."""
    hold = threading.Event()

    def say(call: EndpointCall) -> str:
        if call.key == 1:
            assert hold.wait(60 * load_factor())
        return "four"

    with scripted(say, max_calls=2) as loop, ThreadPoolExecutor(16) as pool:
        chat, key = f"{loop.endpoint.base_url}/chat/completions", loop.open(1, sample_id=101)
        flood = [pool.submit(post, chat, {"messages": HELLO}, key) for _ in range(MAX_REFUSED + 10)]
        while loop.endpoint.counts["refused"] < MAX_REFUSED:
            pass
        hold.set()
        statuses = [f.result()[0] for f in flood]
        assert statuses.count(429) >= MAX_REFUSED
        assert set(statuses) <= {200, 410, 429}
        other = client(loop, 2).chat.completions.create(model="m", messages=HELLO)
        assert other.choices[0].message.content == "four"
    [violation] = loop.violations
    assert violation.key == 1
    assert "sample 101 has 2 calls waiting already" in violation.reason


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"{", 400, "not JSON"),
        (b"[" * 100_000, 400, "not JSON"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 400, "not JSON"),
        (b"\xff", 400, "not JSON"),
        ([], 400, "not a JSON object"),
        ({}, 400, "`messages` is empty"),
        ({"messages": [{"role": "robot"}]}, 400, "messages[0]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            400,
            "give it as a data URL",
        ),
        ({"messages": HELLO, "n": 2}, 400, "`n`"),
        ({"messages": HELLO, "response_format": {"type": "json_object"}}, 400, "ask for the format in the prompt"),
        ({"messages": HELLO, "structured_outputs": {"regex": "a"}}, 400, "ask for the format in the prompt"),
        ({"messages": HELLO, "chat_template_kwargs": {"a": 1}}, 400, "set `data.chat_template_kwargs`"),
        ({"messages": HELLO, "min_tokens": 0, "ignore_eos": False, "bad_words": [], "top_logprobs": None}, 200, ""),
        ({"messages": HELLO, "max_tokens": 0}, 400, "`max_tokens`"),
        ({"messages": HELLO, "stop": 3}, 400, "`stop`"),
        ({"messages": HELLO, "tools": [{"name": "x"}]}, 400, "`tools`"),
        ({"messages": [{"role": "user", "content": "long " * 100_000}]}, 400, "the longest allowed"),
        (b" " * ((8 << 20) + 1), 413, "8 MiB"),
        ({"messages": HELLO, "service_tier": "flex", "anything": 1, "tool_choice": "required"}, 200, ""),
    ],
)
def test_bodies(body: Any, status: int, words: str) -> None:
    with scripted() as loop:
        found, reply = post(f"{loop.endpoint.base_url}/chat/completions", body, loop.open(0))
    assert found == status
    if status != 200:
        assert words in reply["error"]["message"]
        assert set(reply["error"]) == {"message", "type", "param", "code"}


def test_other_hosts_paths_and_methods() -> None:
    with scripted() as loop:
        chat, key = f"{loop.endpoint.base_url}/chat/completions", loop.open(0)
        assert post(chat, {"messages": HELLO}, key, Host="evil.example")[0] == 400
        assert post(f"{loop.endpoint.base_url}/embeddings", {}, key)[0] == 404
        assert post(f"{loop.endpoint.base_url}/models", {}, key)[0] == 405
        port = int(loop.endpoint.url.rpartition(":")[2])
        with pytest.raises(OSError, match="refused"), socket.create_connection((_address(), port), timeout=60):
            pass


def _address() -> str:
    """Another address of this machine: nobody listens there. All of 127.0.0.0/8 is loopback."""
    return "127.0.0.2"


def test_an_endpoint_ends_with_its_thread_and_port() -> None:
    before = set(threading.enumerate())
    with scripted() as loop:
        port = int(loop.endpoint.url.rpartition(":")[2])
        client(loop).models.list()
    assert set(threading.enumerate()) <= before
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port), timeout=60).close()


def test_a_fork_does_not_keep_the_port() -> None:
    endpoint = Endpoint("tiny", 100)
    port = int(endpoint.url.rpartition(":")[2])
    release, hold = os.pipe()
    if not (child := os.fork()):  # waits until this process has checked
        os.close(hold)
        os.read(release, 1)
        os._exit(0)
    endpoint.stop()
    try:
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", port), timeout=60).close()
    finally:
        os.close(release)
        os.close(hold)
        assert os.waitpid(child, 0)[1] == 0


def test_an_agent_library_runs_unmodified() -> None:
    from smolagents import OpenAIModel, ToolCallingAgent, tool

    @tool
    def add(a: int, b: int) -> int:
        """Adds two numbers.

        Args:
            a: the first
            b: the second
        """
        return a + b

    def say(call: EndpointCall) -> str:
        messages = call.body.messages or []
        if messages[-1]["role"] == "user" and "Observation" in str(messages[-1]):
            return written("qwen", "", [{"name": "final_answer", "arguments": {"answer": "five"}}])
        return written("qwen", "", [{"name": "add", "arguments": {"a": 2, "b": 3}}])

    with scripted(say) as loop:
        model = OpenAIModel("m", api_base=loop.endpoint.base_url, api_key=loop.open(0))
        agent = ToolCallingAgent(tools=[add], model=model, max_steps=4, verbosity_level=0)
        assert agent.run("What is 2 + 3?") == "five"
        first, second = loop.sessions[0].branches  # the library writes its calls into the history as text: it forks
    assert [len(b.turns) for b in (first, second)] == [1, 1]
    assert loop.sessions[0].sampled_branches() == [first, second]
