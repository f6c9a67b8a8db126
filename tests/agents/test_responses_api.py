"""The Responses API of the endpoint, with the client of OpenAI: a translation into the one session."""

import json
import logging
from typing import Any

import openai
import pytest

from agents.families import sampled, written
from agents.scripted_loop import ScriptedLoop, scripted
from agents.test_endpoint import client, post
from distflow.agents.endpoint import EndpointCall
from distflow.agents.protocols.call import warn_once

ADD: Any = {
    "type": "function",
    "name": "add",
    "description": "Adds two numbers.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    "strict": False,
}
PATCH: Any = {"type": "custom", "name": "patch", "description": "Changes a file."}
CALL = {"name": "add", "arguments": {"a": 1, "b": 2}}


def adds(call: EndpointCall) -> str:
    """Thinks and calls the tool, then thinks and says its result."""
    last = (call.body.messages or [])[-1]
    if last["role"] == "tool":
        return f"<think>it is {last['content']}</think>\n{last['content']}"
    return written("qwen", "<think>so</think>adding", [CALL])


def sampled_tokens(loop: ScriptedLoop) -> list[list[int]]:
    return [[t for t, ours in zip(b.tokens, b.mask, strict=True) if ours] for b in loop.sessions[0].sampled_branches()]


def test_a_reply_has_what_was_sampled_with_its_log_probs() -> None:
    with scripted("  four\n") as loop:
        reply = client(loop).responses.create(
            model="any", instructions="Be brief.", input="2 + 2?", include=["message.output_text.logprobs"]
        )
        [branch] = loop.sessions[0].branches
    assert (reply.output_text, reply.status, reply.model) == ("  four\n", "completed", "any")
    assert [(m["role"], m["content"]) for m in branch.messages[:2]] == [("system", "Be brief."), ("user", "2 + 2?")]
    assert branch.tokens == sampled("qwen", "  four\n")
    [item] = reply.output
    assert item.type == "message"
    [part] = item.content
    assert part.type == "output_text"
    assert [row.logprob for row in part.logprobs or []] == [-0.5] * len(branch.tokens)
    assert reply.usage is not None
    assert (reply.usage.input_tokens, reply.usage.output_tokens) == (len(branch.prompt), len(branch.tokens))


@pytest.mark.parametrize("how", ["items", "without_reasoning", "encrypted", "previous"])
def test_a_tool_loop_with_reasoning_is_one_branch(how: str) -> None:
    """Whether the agent sends the model's items back, leaves the reasoning out, or names the reply before."""
    include: Any = ["reasoning.encrypted_content"] if how == "encrypted" else []
    with scripted(adds) as loop:
        agent = client(loop)
        items: Any = [{"role": "user", "content": "add 1 and 2"}]
        common: Any = {"model": "m", "tools": [ADD], "include": include, "instructions": "Add."}
        first = agent.responses.create(input=items, **common)
        assert [i.type for i in first.output] == ["reasoning", "message", "function_call"]
        thought, message, call = first.output
        assert thought.type == "reasoning"
        assert (thought.content or [])[0].text == "so"
        assert message.type == "message"
        assert call.type == "function_call"
        assert (call.name, json.loads(call.arguments)) == ("add", CALL["arguments"])
        back = [i.model_dump(exclude_none=True) for i in first.output]
        if how == "without_reasoning":
            back = back[1:]
        if how == "encrypted":
            del back[0]["content"]
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
        if how == "previous":
            last = agent.responses.create(input=[result], previous_response_id=first.id, **common)
        else:
            last = agent.responses.create(input=[*items, *back, result], **common)
        [branch] = loop.sessions[0].branches
    assert last.output_text.strip() == "3"
    assert [m["role"] for m in branch.messages] == ["system", "user", "assistant", "tool", "assistant"]
    first_turn = sampled("qwen", written("qwen", "<think>so</think>adding", [CALL]))
    assert sampled_tokens(loop) == [[*first_turn, *sampled("qwen", "<think>it is 3</think>\n3")]]


def test_streams_typed_events() -> None:
    with (
        scripted(adds) as loop,
        client(loop).responses.stream(model="m", input="add", tools=[ADD]) as stream,
    ):
        events = list(stream)
        final = stream.get_final_response()
    names = [e.type for e in events]
    assert names[:2] == ["response.created", "response.in_progress"]
    assert names[-1] == "response.completed"
    assert [e.sequence_number for e in events] == list(range(len(events)))
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    thought = "".join(e.delta for e in events if e.type == "response.reasoning_text.delta")
    arguments = "".join(e.delta for e in events if e.type == "response.function_call_arguments.delta")
    assert (text.strip(), thought, json.loads(arguments)) == ("adding", "so", CALL["arguments"])
    assert [i.type for i in final.output] == ["reasoning", "message", "function_call"]


def test_a_custom_tool_takes_text() -> None:
    def say(call: EndpointCall) -> str:
        arguments = {"input": "*** Begin"}
        last = (call.body.messages or [])[-1]
        return "done" if last["role"] == "tool" else written("qwen", "", [{"name": "patch", "arguments": arguments}])

    with scripted(say) as loop:
        items: list[Any] = [{"role": "user", "content": "change it"}]
        first = client(loop).responses.create(model="m", input=items, tools=[PATCH])
        [call] = first.output
        assert call.type == "custom_tool_call"
        assert (call.name, call.input) == ("patch", "*** Begin")
        items += [call.model_dump(), {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "ok"}]
        assert client(loop).responses.create(model="m", input=items, tools=[PATCH]).output_text == "done"
        assert len(loop.sessions[0].branches) == 1


def test_tools_of_a_namespace_are_called_in_it() -> None:
    def say(call: EndpointCall) -> str:
        last = (call.body.messages or [])[-1]
        return "done" if last["role"] == "tool" else written("qwen", "", [CALL | {"name": "sums__add"}])

    with scripted(say) as loop:
        tools: Any = [{"type": "namespace", "name": "sums", "description": "Sums.", "tools": [ADD]}]
        items: list[Any] = [{"role": "user", "content": "add"}]
        [call] = client(loop).responses.create(model="m", input=items, tools=tools).output
        assert call.type == "function_call"
        assert (call.namespace, call.name) == ("sums", "add")
        items += [call.model_dump(), {"type": "function_call_output", "call_id": call.call_id, "output": "3"}]
        assert client(loop).responses.create(model="m", input=items, tools=tools).output_text == "done"
        assert len(loop.sessions[0].branches) == 1


def test_a_turn_that_is_cut_is_incomplete() -> None:
    with scripted("one two three four five") as loop:
        reply = client(loop).responses.create(model="m", input="count", max_output_tokens=2)
    assert (reply.status, reply.incomplete_details and reply.incomplete_details.reason) == (
        "incomplete",
        "max_output_tokens",
    )


def test_instructions_are_those_of_the_call() -> None:
    """As the API has it: they are not carried over from the reply that is continued."""
    with scripted() as loop:
        first = client(loop).responses.create(model="m", input="one", instructions="A")
        client(loop).responses.create(model="m", input="two", instructions="B", previous_response_id=first.id)
        last = loop.sessions[0].branches[-1]
    assert [m["content"] for m in last.messages[:4]] == ["B", "one", "four", "two"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"input": "x", "background": True}, "`background`: True is not supported here; wait for the reply"),
        ({"input": "x", "truncation": "auto"}, "`truncation`"),
        ({"input": "x", "include": ["file_search_call.results"]}, "`include`"),
        ({"input": "x", "text": {"format": {"type": "json_schema"}}}, r"`text\.format`"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, r"`tools\[0\]`: a tool of type 'web_search'"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "item_reference.*send the item itself"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}]},
            "has an image",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input_file"),
        ({"input": [{"type": "reasoning", "encrypted_content": "gAAA_not_ours"}]}, "not from here"),
        ({"input": [{"role": "robot", "content": "x"}]}, r"`input\[0\]` has no role"),
        ({"input": []}, "`input` is empty"),
        ({"input": "x", "top_logprobs": 3}, "`top_logprobs`: 3 is not supported"),
        ({"input": "x", "max_output_tokens": 0}, "`max_output_tokens`"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(body: dict[str, Any], words: str) -> None:
    with scripted() as loop:
        client(loop)
        with pytest.raises(openai.BadRequestError, match=words):
            client(loop).post("/responses", body={"model": "m", **body}, cast_to=object)
        assert not loop.sessions[0].branches


def test_a_reply_of_another_session_or_one_that_was_not_stored_cannot_be_continued() -> None:
    with scripted() as loop:
        mine = client(loop, 1).responses.create(model="m", input="mine")
        unstored = client(loop, 0).responses.create(model="m", input="x", store=False)
        for reply in (mine, unstored):
            with pytest.raises(openai.NotFoundError, match="no reply of this session"):
                client(loop, 0).responses.create(model="m", input="and?", previous_response_id=reply.id)
        assert [len(loop.sessions[k].branches) for k in (0, 1)] == [1, 1]


def test_a_parameter_that_is_overridden_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    warn_once.cache_clear()
    caplog.set_level(logging.WARNING)
    with scripted() as loop:
        for _ in range(2):
            client(loop).responses.create(model="m", input="x", temperature=0.3, tool_choice="required", tools=[ADD])
            client(loop).chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}], seed=3)
        post(f"{loop.endpoint.base_url}/responses", {"input": "x", "colour": "red"}, loop.keys[0])
    said = [r.getMessage() for r in caplog.records if r.name.startswith("distflow")]
    assert said == [
        "endpoint: agents set `temperature`, which has no effect: the model is sampled as `rollout` says",
        "endpoint: agents set `tool_choice` to 'required', which has no effect: the model is free to call",
        "endpoint: agents set `seed`, which has no effect: the model is sampled as `rollout` says",
        "endpoint: agents set `colour`, which is not known here and has no effect",
    ]
