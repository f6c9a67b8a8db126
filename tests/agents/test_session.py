"""A session records what was sampled and what the environment said, token by token, in branches."""

from typing import Any

import pytest

from agents.families import ADD, FAMILIES, WITH_TOOLS, completion, renderer, sampled, tokenizer, written
from distflow.agents.message import count_common
from distflow.agents.session import Branch, ConversationLimits, Ended, Session, TurnRequest
from distflow.errors import DataError

LIMITS = ConversationLimits(max_turns=10, max_tokens=2000)


def session(family: str = "qwen", limits: ConversationLimits = LIMITS) -> Session:
    return Session(7, renderer(family), limits)


def play(s: Session, branch: Branch, text: str, finished: bool = True, family: str = "qwen") -> list[int]:
    """Lets the model say a text, and returns its tokens."""
    assert isinstance(s.next_request(branch), TurnRequest)
    tokens = sampled(family, text, finished)
    s.sampled(branch, completion(tokens, finished, 3, -0.5))
    return tokens


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def test_a_conversation_is_what_was_sampled_and_what_was_said() -> None:
    s = session()
    b = s.begin("How much is 1 + 1?")
    first = play(s, b, "<think>\nhm\n</think>\n\nTwo.")
    assert s.observe(b, [user("And doubled?")]) is None
    said = b.tokens[len(first) :]
    second = play(s, b, "Four.")
    assert b.tokens == first + said + second
    assert b.mask == [True] * len(first) + [False] * len(said) + [True] * len(second)
    assert b.logprobs == [-0.5] * len(first) + [0.0] * len(said) + [-0.5] * len(second)
    assert [(t.start, t.length, t.weight_version) for t in b.turns] == [
        (0, len(first), 3),
        (len(first + said), len(second), 3),
    ]
    made = tokenizer("qwen")
    assert made.decode(said) == "\n<|im_start|>user\nAnd doubled?<|im_end|>\n<|im_start|>assistant\n"
    assert [m["role"] for m in b.messages] == ["user", "assistant", "user", "assistant"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_is_encoded_as_for_a_single_turn(family: str) -> None:
    s = session(family)
    assert s.begin("What is\n\n a 7?").prompt == s.renderer.text.encode([user("What is\n\n a 7?")])
    assert s.next_request(s.branches[0]) == TurnRequest(tuple(s.branches[0].prompt), 0, 2000)


@pytest.mark.parametrize("family", WITH_TOOLS)
def test_tool_calls_are_read_and_their_results_appended(family: str) -> None:
    s = session(family)
    b = s.begin("1 + 2?", [ADD])
    s.next_request(b)
    tokens = sampled(family, written(family, "", [{"name": "add", "arguments": {"a": 1, "b": 2}}]))
    message = s.sampled(b, completion(tokens))
    assert (message.finish_reason, message.errors, message.content) == ("tool_calls", [], "")
    [call] = message.tool_calls
    assert (call.name, call.arguments, len(call.id)) == ("add", {"a": 1, "b": 2}, 9)
    assert s.observe(b, [{"role": "tool", "content": "3", "tool_call_id": call.id, "name": "add"}]) is None
    assert b.tokens[: len(tokens)] == tokens
    assert "3" in tokenizer(family).decode(b.tokens[len(tokens) :])
    assert isinstance(s.next_request(b), TurnRequest)


def test_limits_end_a_conversation_with_their_name() -> None:
    s = session(limits=ConversationLimits(max_turns=2, max_tokens=100, turn_tokens=5))
    b = s.begin("go")
    request = s.next_request(b)
    assert isinstance(request, TurnRequest)
    assert request.max_tokens == 5
    s.sampled(b, completion([5, 6, 7]))
    assert s.observe(b, [user("x " * 200)]) == Ended("max_tokens")
    assert s.next_request(b) == Ended("max_tokens")
    assert (b.tokens, b.mask) == ([5, 6, 7], [True] * 3)  # nobody needs the rest
    c = s.begin("again")
    s.next_request(c)
    s.sampled(c, completion([5]))
    s.observe(c, [user("x")])
    assert s.next_request(c) == Ended("max_turns")


def test_no_two_sampled_tokens_have_one_position() -> None:
    s = session()
    one, other = s.begin("a"), s.begin("b")
    requests = [s.next_request(one), s.next_request(other)]
    used: list[int] = []
    for branch, request in zip((one, other), requests, strict=True):
        assert isinstance(request, TurnRequest)
        tokens = sampled("qwen", "hello")
        s.sampled(branch, completion(tokens))
        used += range(request.position, request.position + len(tokens))
    s.observe(other, [user("more")])
    request = s.next_request(other)
    assert isinstance(request, TurnRequest)
    assert request.position not in used
    assert request.position > max(used)
    assert len(set(used)) == len(used)


def test_the_position_is_the_index_in_the_response_while_there_is_one_branch() -> None:
    s = session()
    b = s.begin("a")
    play(s, b, "hello")
    s.observe(b, [user("more")])
    request = s.next_request(b)
    assert isinstance(request, TurnRequest)
    assert request.position == len(b.tokens)


def test_two_observations_in_a_row_are_rendered_as_one() -> None:
    results = [{"role": "tool", "content": str(i), "tool_call_id": f"call0000{i}"} for i in range(2)]
    branches = []
    for parts in ([results], [results[:1], results[1:]]):
        s = session()
        b = s.begin("go", [ADD])
        play(s, b, written("qwen", "", [{"name": "add", "arguments": {}}] * 2))
        for part in parts:
            s.observe(b, part)
        branches.append(b)
    assert branches[0].tokens == branches[1].tokens


def test_a_history_continues_its_branch() -> None:
    s = session()
    b = s.match([user("hi")])
    play(s, b, "Hello. ")
    again = s.match([user("hi"), {"role": "assistant", "content": "Hello."}, user("bye")])  # stripped by the agent
    assert again is b
    assert len(s.branches) == 1
    assert not all(b.mask)


def test_a_history_with_tool_calls_continues_whatever_their_ids_and_form() -> None:
    s = session()
    b = s.match([user("hi")], [ADD])
    play(s, b, written("qwen", "x", [{"name": "add", "arguments": {"a": 1, "b": 2}}]))
    called = {"id": "call_x", "type": "function", "function": {"name": "add", "arguments": '{"b": 2, "a": 1}'}}
    history = [
        user("hi"),
        {"role": "assistant", "content": [{"type": "text", "text": "x"}], "tool_calls": [called]},
        {"role": "tool", "content": "3", "tool_call_id": "call_x"},
    ]
    assert s.match(history, [ADD]) is b


def test_another_history_forks_where_they_part() -> None:
    s = session()
    b = s.match([user("hi")])
    first = play(s, b, "Hello.")
    told = [user("hi"), {"role": "assistant", "content": "Hello."}]
    s.match([*told, user("one")])
    play(s, b, "First.")
    fork = s.match([*told, user("two")])
    assert fork is not b
    assert fork.tokens[: len(first)] == first
    assert fork.mask[: len(first)] == [True] * len(first)
    play(s, fork, "A longer second answer.")
    fresh = s.match([user("other")])
    assert not fresh.tokens
    play(s, fresh, "x")
    assert s.sampled_branches() == [b, fork, fresh]
    assert [len(branch.own_turns) for branch in s.sampled_branches()] == [2, 1, 1]


def test_a_history_whose_turn_was_rewritten_is_no_continuation() -> None:
    s = session()
    b = s.match([user("hi")])
    play(s, b, "Hello.")
    other = s.match([user("hi"), {"role": "assistant", "content": "Edited."}, user("go on")])
    assert other is not b
    assert not other.tokens  # all of it is prompt
    assert "Edited." in tokenizer("qwen").decode(other.prompt)


def test_the_same_history_twice_at_once_is_two_branches() -> None:
    s = session()
    one = s.match([user("hi")])
    s.next_request(one)
    assert s.match([user("hi")]) is not one


def test_other_tools_are_another_prompt() -> None:
    s = session()
    b = s.match([user("hi")])
    play(s, b, "Hello.")
    assert s.match([user("hi"), {"role": "assistant", "content": "Hello."}, user("x")], [ADD]) is not b


def test_a_history_of_tokens_continues_forks_or_begins() -> None:
    s = session()
    prompt = sampled("qwen", "a prompt", finished=False)
    b = s.match_tokens(prompt)
    assert b.prompt == prompt
    first = play(s, b, "Hello.")
    assert s.match_tokens(prompt + first + [9, 9]) is b
    assert b.tokens == [*first, 9, 9]
    assert b.mask == [True] * len(first) + [False] * 2
    play(s, b, "Bye.")
    fork = s.match_tokens(prompt + first + [8])
    assert fork is not b
    assert fork.tokens == [*first, 8]
    assert s.match_tokens([*prompt[:-1], 8]).prompt == [*prompt[:-1], 8]


def test_a_turn_has_its_reward() -> None:
    s = session()
    b = s.begin("a")
    with pytest.raises(DataError, match="sample 7: a reward came for a turn before the first"):
        s.reward_turn(b, 1.0)
    play(s, b, "x")
    s.reward_turn(b, 0.5)
    assert b.turns[0].reward == 0.5


def test_a_transcript_counts_the_tokens_of_every_turn() -> None:
    s = session()
    b = s.begin([{"role": "system", "content": "be brief"}, user("go")], [ADD])
    first = play(s, b, written("qwen", "", [{"name": "add", "arguments": {"a": 1}}]))
    s.reward_turn(b, 0.25)
    s.observe(b, [{"role": "tool", "content": "3"}, {"role": "tool", "content": "4"}])
    said = len(b.tokens) - len(first)
    play(s, b, "so 7", finished=False)
    s.observe(b, [user("bye")])
    assert [{k: m.get(k) for k in ("role", "tokens", "reward", "cut")} for m in b.transcript()] == [
        {"role": "system", "tokens": None, "reward": None, "cut": None},
        {"role": "user", "tokens": len(b.prompt), "reward": None, "cut": None},
        {"role": "assistant", "tokens": len(first), "reward": 0.25, "cut": None},
        {"role": "tool", "tokens": None, "reward": None, "cut": None},
        {"role": "tool", "tokens": said, "reward": None, "cut": None},
        {"role": "assistant", "tokens": b.turns[1].length, "reward": None, "cut": True},
        {"role": "user", "tokens": None, "reward": None, "cut": None},
    ]
    assert "tokens" not in b.messages[0]


def test_what_is_far_too_long_is_not_even_tokenized() -> None:
    s = session()
    b = s.begin("a")
    play(s, b, "x")
    assert s.observe(b, [user("x" * 100_000_000)]) == Ended("max_tokens")


def test_nothing_is_said_or_asked_while_a_turn_is_generated() -> None:
    s = session()
    b = s.begin("a")
    s.next_request(b)
    for action in (lambda: s.next_request(b), lambda: s.observe(b, [user("x")])):
        with pytest.raises(DataError, match="sample 7: its latest turn is not generated yet"):
            action()
    s.abandon(b)
    assert isinstance(s.next_request(b), TurnRequest)


@pytest.mark.parametrize("tokens", [[1, -1], [10**30], ["a"], [True], [0.5], [None]])
def test_what_is_no_token_is_refused(tokens: list[Any]) -> None:
    with pytest.raises(DataError, match="is no token of 'qwen'"):
        session().match_tokens(tokens)
    with pytest.raises(DataError, match="is no token of 'qwen'"):
        session().renderer.decode(tokens)


@pytest.mark.parametrize("tools", [["add"], [{}], [{"function": 7}], "add", [None]])
def test_what_is_no_tool_is_refused(tools: Any) -> None:
    with pytest.raises(DataError, match="a tool is "):
        session().begin("a", tools)


def test_a_message_that_is_nested_too_deeply_is_refused() -> None:
    deep: Any = "x"
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(DataError, match="nested too deeply"):
        session().begin([{"role": "user", "content": "a", "extra": deep}])


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ("hi", "a message is 'hi'"),
        ({"content": "hi"}, "it has a role"),
        ({"role": "user", "content": 7}, "the content of a message is 7"),
        ({"role": "user", "content": [{"type": "video_url"}]}, "list of parts with text or images"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "an image of a message is None"),
        (
            {"role": "user", "content": [{"type": "image", "image": "data:,"}]},
            "an image, and .* reads none",
        ),
        ({"role": "assistant", "content": "", "tool_calls": [{"function": {}}]}, "tool calls"),
        ({"role": "user", "content": "\ud800"}, "lone surrogate"),
    ],
)
def test_a_bad_message_is_named(message: object, error: str) -> None:
    with pytest.raises(DataError, match=error):
        session().begin([message])  # type: ignore[list-item]


def test_a_turn_that_is_sent_back_with_an_image_is_another() -> None:
    text = [{"role": "assistant", "content": "look"}]
    seen = [{"role": "assistant", "content": [{"type": "text", "text": "look"}, {"type": "image", "image": "a.png"}]}]
    assert (count_common(text, seen), count_common(seen, text), count_common(seen, seen)) == (0, 0, 1)
