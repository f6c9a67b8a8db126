"""The Messages API of the endpoint, with the client of Anthropic: a translation into the one session."""

from typing import Any

import pytest

from agents.families import sampled, written
from agents.scripted_loop import ScriptedLoop, scripted
from agents.test_responses_api import CALL, adds, sampled_tokens
from distflow.agents.session import ConversationLimits

anthropic = pytest.importorskip("anthropic")

ADD: Any = {
    "name": "add",
    "description": "Adds two numbers.",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
}
HELLO: Any = [{"role": "user", "content": "hello"}]


def client(loop: ScriptedLoop, key: int = 0, **options: Any) -> Any:
    own = loop.keys.get(key) or loop.open(key)
    return anthropic.Anthropic(base_url=loop.endpoint.url, api_key=own, max_retries=0, **options)


def test_a_reply_has_what_was_sampled() -> None:
    with scripted("  four\n") as loop:
        for agent in (client(loop), anthropic.Anthropic(base_url=loop.endpoint.base_url, auth_token=loop.keys[0])):
            reply = agent.messages.create(model="any", max_tokens=100, system="Be brief.", messages=HELLO)
            assert ([b.text for b in reply.content], reply.stop_reason, reply.model) == (
                ["  four\n"],
                "end_turn",
                "any",
            )
        branch = loop.sessions[0].branches[0]
    assert [m["content"] for m in branch.messages[:2]] == ["Be brief.", "hello"]
    assert branch.tokens == sampled("qwen", "  four\n")
    assert (reply.usage.input_tokens, reply.usage.output_tokens) == (len(branch.prompt), len(branch.tokens))


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_loop_is_one_branch_with_or_without_its_thinking_sent_back(thinking: bool, stream: bool) -> None:
    with scripted(adds) as loop:
        agent = client(loop)
        messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "add 1 and 2"}]}]
        common: Any = {"model": "m", "max_tokens": 200, "tools": [ADD], "system": [{"type": "text", "text": "Add."}]}

        def ask() -> Any:
            if not stream:
                return agent.messages.create(messages=messages, **common)
            with agent.messages.stream(messages=messages, **common) as events:
                return events.get_final_message()

        first = ask()
        assert [b.type for b in first.content] == ["thinking", "text", "tool_use"]
        assert (first.stop_reason, first.content[0].thinking) == ("tool_use", "so")
        assert (first.content[2].name, first.content[2].input) == ("add", CALL["arguments"])
        counted = agent.messages.count_tokens(model="m", messages=messages, tools=[ADD], system="Add.").input_tokens
        back = [b.model_dump(exclude_none=True) for b in first.content][0 if thinking else 1 :]
        result = {"type": "tool_result", "tool_use_id": first.content[2].id, "content": [{"type": "text", "text": "3"}]}
        messages += [{"role": "assistant", "content": back}, {"role": "user", "content": [result]}]
        longer = agent.messages.count_tokens(model="m", messages=messages, tools=[ADD], system="Add.").input_tokens
        last = ask()
        [branch] = loop.sessions[0].branches
    assert (counted, longer) == (first.usage.input_tokens, last.usage.input_tokens)
    assert [m["role"] for m in branch.messages] == ["system", "user", "assistant", "tool", "assistant"]
    turn = sampled("qwen", written("qwen", "<think>so</think>adding", [CALL]))
    assert sampled_tokens(loop) == [[*turn, *sampled("qwen", "<think>it is 3</think>\n3")]]


def test_a_thread_that_is_held_here_goes_on_with_its_tools() -> None:
    """As the client's own tool runner sends it: after the first call, only what is new."""

    @anthropic.beta_tool
    def add(a: int, b: int) -> str:
        """Adds two numbers.

        Args:
            a: one.
            b: the other.
        """
        return str(a + b)

    with scripted(adds) as loop:
        common: Any = {"model": "m", "max_tokens": 99}
        first: Any = {**common, "tools": [ADD], "system": "Add.", "messages": HELLO, "thread": {"type": "create"}}
        asked = client(loop).beta.messages.create(**first)
        result = {"type": "tool_result", "tool_use_id": asked.content[2].id, "content": "3"}
        more = {"messages": [{"role": "user", "content": [result]}], "thread": _continues(asked.id)}
        client(loop).beta.messages.create(**common, **more)
        [branch] = loop.sessions[0].branches
        assert [m["role"] for m in branch.messages] == ["system", "user", "assistant", "tool", "assistant"]
        with pytest.raises(anthropic.NotFoundError, match="thread_not_found"):
            client(loop).beta.messages.create(**common, messages=HELLO, thread=_continues("msg_x"))
        runner = client(loop, 1).beta.messages.tool_runner(**common, tools=[add], messages=HELLO)
        assert runner.until_done().content[-1].text.strip() == "3"
        assert [len(b.turns) for b in loop.sessions[1].branches] == [2]


def _continues(previous: str) -> dict[str, str]:
    return {"type": "continue", "previous_message_id": previous}


def test_streams_typed_events() -> None:
    with scripted(adds) as loop:
        stream = client(loop).messages.create(model="m", max_tokens=99, messages=HELLO, tools=[ADD], stream=True)
        events = list(stream)
    assert [e.type for e in events if not e.type.startswith("content")] == [
        "message_start",
        "message_delta",
        "message_stop",
    ]
    assert [e.content_block.type for e in events if e.type == "content_block_start"] == ["thinking", "text", "tool_use"]
    kinds = [e.delta.type for e in events if e.type == "content_block_delta"]
    assert kinds == ["thinking_delta", "text_delta", "input_json_delta"]
    assert events[-2].delta.stop_reason == "tool_use"


def test_stop_reasons() -> None:
    with scripted("one two three. four five") as loop:
        create = client(loop).messages.create
        cut = create(model="m", max_tokens=2, messages=HELLO)
        stopped = create(model="m", max_tokens=99, messages=HELLO, stop_sequences=["five", "three"])
    assert (cut.stop_reason, cut.stop_sequence) == ("max_tokens", None)
    assert (stopped.stop_reason, stopped.stop_sequence, stopped.content[0].text) == (
        "stop_sequence",
        "three",
        "one two ",
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "a tool of type 'web_search_20250305'"),
        ({"messages": [*HELLO, {"role": "assistant", "content": "It is"}]}, "cannot be prefilled"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "an image .* is None",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "of type 'document'"),
        ({"messages": []}, "`messages` is empty"),
        ({"messages": [{"role": "user", "content": 3}]}, r"`messages\[0\]\.content` is 3"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "`context_management`"),
        ({"container": "c"}, "`container`"),
        ({"output_config": {"effort": "low", "format": {"type": "json_schema"}}}, r"`output_config\.format`"),
        ({"max_tokens": None}, "`max_tokens` is missing"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(change: dict[str, Any], words: str) -> None:
    with scripted() as loop:
        agent = client(loop)
        with pytest.raises(anthropic.BadRequestError, match=words) as caught:
            agent.post("/v1/messages", body={"model": "m", "max_tokens": 9, "messages": HELLO} | change, cast_to=object)
        assert caught.value.body["error"]["type"] == "invalid_request_error"
        assert not loop.sessions[0].branches


def test_errors_are_those_of_the_client() -> None:
    with scripted(limits=ConversationLimits(1, 3000)) as loop:
        agent, common = client(loop), {"model": "m", "max_tokens": 9, "messages": HELLO}
        agent.messages.create(**common)
        with pytest.raises(anthropic.BadRequestError, match=r"has reached its limit environment\.max_turns"):
            agent.messages.create(**common)
        stranger = anthropic.Anthropic(base_url=loop.endpoint.url, api_key="sk-wrong", max_retries=0)
        with pytest.raises(anthropic.AuthenticationError, match="the key is not of a session"):
            stranger.messages.create(**common)
        loop.endpoint.close(0)
        with pytest.raises(anthropic.APIStatusError, match="has ended"):
            agent.messages.create(**common)
