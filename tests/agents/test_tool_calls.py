"""Tool calls are read in the formats of several families; a malformed one is an error text, never an exception."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.families import ADD, WITH_TOOLS, renderer, sampled, tokenizer, written
from distflow.agents import tool_calls
from distflow.agents.tool_calls import (
    PARSERS,
    ToolCall,
    hermes,
    llama,
    mistral,
    parser_for,
    plain_json,
    qwen_xml,
    tags_or_json,
)
from distflow.errors import ConfigError

ONE, F = ToolCall("add", {"a": 1, "b": 2}), ToolCall("f", {"a": 1})


@pytest.mark.parametrize(
    ("parser", "text", "content", "calls"),
    [
        (hermes, '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>', "", [ONE]),
        (hermes, 'I add.\n<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>', "I add.", [ONE]),
        (hermes, '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}', "", [ONE]),  # a stop text
        (hermes, '<tool_call>{"name": "add", "parameters": "{\\"a\\": 1, \\"b\\": 2}"}</tool_call>', "", [ONE]),
        (hermes, '<tool_call>{"name": "f"}</tool_call>', "", [ToolCall("f", {})]),
        (
            hermes,
            '<tool_call>{"name": "f", "arguments": {"x": {"y": "}</tool_call>{"}}}</tool_call>',
            "",
            [ToolCall("f", {"x": {"y": "}</tool_call>{"}})],
        ),
        (hermes, "no call", "no call", []),
        (llama, '{"name": "add", "parameters": {"a": 1, "b": 2}}', "", [ONE]),
        (llama, '<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": 2}}', "", [ONE]),
        (
            llama,
            '{"name": "add", "parameters": {"a": 1, "b": 2}}; {"name": "f", "parameters": {}}',
            "",
            [ONE, ToolCall("f", {})],
        ),
        (llama, '{"answer": 3}', '{"answer": 3}', []),
        (mistral, 'ok[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}}]', "ok", [ONE]),
        (mistral, "[1, 2]", "[1, 2]", []),
        (plain_json, '```json\n[{"name": "add", "arguments": {"a": 1, "b": 2}}]\n```', "", [ONE]),
        (plain_json, '{"function": {"name": "add", "arguments": {"a": 1, "b": 2}}}', "", [ONE]),
        (plain_json, 'As {"name": "x", "arguments": {}} shows', 'As {"name": "x", "arguments": {}} shows', []),
        (
            qwen_xml,
            "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n</function>\n</tool_call>",
            "",
            [ONE],
        ),
        (tags_or_json, "<tool_call><function=f></function></tool_call>", "", [ToolCall("f", {})]),
    ],
)
def test_calls_are_read(parser: tool_calls.ToolParser, text: str, content: str, calls: list[ToolCall]) -> None:
    assert parser(text, [ADD]) == (content, calls, [])


def test_parameters_in_xml_have_the_types_of_the_schema() -> None:
    types = {"s": "string", "n": "number", "o": "object", "b": "boolean", "u": None}
    tool = {"name": "f", "parameters": {"properties": {k: {"type": t} if t else {} for k, t in types.items()}}}
    values = {"s": "7", "n": "1.5", "o": '{"x": [1]}', "b": "True", "u": "7", "n2": "x"}
    inner = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
    _, [call], _ = qwen_xml(f"<tool_call>\n<function=f>\n{inner}</function>\n</tool_call>", [tool])
    assert call.arguments == {"s": "7", "n": 1.5, "o": {"x": [1]}, "b": True, "u": "7", "n2": "x"}


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ('{"name": "add", "arguments": {"a": 1', "not valid JSON"),
        ("{'name': 'add'}", "not valid JSON (Expecting property name enclosed in double quotes at character 1)"),
        ('{"arguments": {}}', 'has no "name"'),
        ('{"name": 7, "arguments": {}}', 'has no "name"'),
        ('{"name": "add", "arguments": [1]}', "the arguments of the tool call 'add' are not a JSON object"),
        ('{"name": "add", "arguments": "1"}', "are not a JSON object"),
        ('{"name": "add", "arguments": {"a": NaN}}', "NaN is no JSON number"),
        ('{"name": "add", "arguments": {"a": "\\ud800"}}', "lone surrogate"),
        ('{"name": "add", "arguments": ' + '{"a": ' * 100_000, "not valid JSON"),
        ('{"name": "add", "arguments": {"a": ' + "1" * 10_000 + "}}", "not valid JSON"),
        ('{"name": "add", "arguments": {}} {"name": "add"}', "more than one JSON object"),
        ("[1]", "a tool call is a JSON object"),
        ("", "not valid JSON"),
    ],
)
def test_a_malformed_call_is_an_error_for_the_model(body: str, error: str) -> None:
    good = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    content, calls, errors = hermes(f"so:<tool_call>{body}</tool_call>{good}")
    assert error in errors[0]
    assert len(errors[0]) < 300
    assert len(errors) == 1
    assert calls in ([ONE], [])  # a call that never ends takes the next one with it
    assert content == "so:"


@pytest.mark.parametrize("name", PARSERS)
@given(text=st.text(alphabet=st.sampled_from(list('{}[]":,;aname\\ <>/=\n')), max_size=60) | st.text(max_size=40))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_no_text_raises(name: str, text: str) -> None:
    tags = ("", "<tool_call>", "[TOOL_CALLS]", "<|python_tag|>")
    for wrapped in [tag + text + end for tag in tags for end in ("", "</tool_call>")]:
        content, calls, errors = PARSERS[name](wrapped, [ADD])
        assert isinstance(content, str)
        assert all(isinstance(c.arguments, dict) and c.name for c in calls)
        assert all(errors)


_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | _TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize("family", WITH_TOOLS)
@given(
    calls=st.lists(
        st.fixed_dictionaries(
            {
                "name": st.from_regex(r"[a-z_]{1,8}", fullmatch=True),
                "arguments": st.dictionaries(st.from_regex(r"[a-z]{1,5}", fullmatch=True), _JSON, max_size=3),
            }
        ),
        min_size=1,
        max_size=3,
    )
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_whatever_is_called_arrives(family: str, calls: list[dict[str, Any]]) -> None:
    content, found, errors = parser_for(tokenizer(family))(written(family, "", calls), [ADD])
    assert [(c.name, c.arguments) for c in found] == [(c["name"], c["arguments"]) for c in calls]
    assert (content, errors) == ("", [])


def test_calls_that_are_only_thought_of_are_not_made() -> None:
    call = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    r = renderer("qwen")
    for text in (f"<think>maybe {call}</think>Done.", f"<think>maybe {call}"):
        assert r.read(sampled("qwen", text), [ADD]) == (text, text, [], [])
    thought = f"\n<think>maybe {call}</think>\n"
    assert r.read(sampled("qwen", thought + call), [ADD])[1:3] == (thought.rstrip(), [ONE])
    template = tokenizer("qwen").chat_template
    assert isinstance(template, str)
    prefilled = template.replace("<|im_start|>assistant\n{% endif -%}", "<|im_start|>assistant\n<think>\n{% endif -%}")
    r = renderer("qwen", chat_template=prefilled)
    assert r.read(sampled("qwen", f"maybe {call}"), [ADD])[2] == []
    assert r.read(sampled("qwen", f"maybe {call}</think>{call}"), [ADD])[2] == [ONE]


@pytest.mark.parametrize("family", WITH_TOOLS)
def test_the_parser_follows_from_the_template(family: str) -> None:
    text = written(family, "", [{"name": "add", "arguments": {"a": 1, "b": 2}}])
    assert parser_for(tokenizer(family))(text)[1] == [ONE]
    assert parser_for(tokenizer("gemma"), family)(text)[1] == [ONE]


def test_a_template_without_tools_has_calls_in_tags_or_plain_json() -> None:
    parse = parser_for(tokenizer("gemma"))
    body = json.dumps({"name": "add", "arguments": {"a": 1, "b": 2}})
    assert parse(body)[1] == parse(f"<tool_call>{body}</tool_call>")[1] == [ONE]


def test_an_unknown_parser_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tool_parser: there is no parser 'herms'; did you mean 'hermes'"):
        parser_for(tokenizer("qwen"), "herms")


def test_a_response_template_of_the_tokenizer_is_read_by_transformers() -> None:
    template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "tool_calls": {
                "open": "[[",
                "close": "]]",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": {"name": "{content.f}", "arguments": "{content.x}"}},
            },
            "content": {"content": "text"},
        },
    }
    r = renderer("hermes", response_template=template)
    assert r.parse('ok [[{"f": "add", "x": {"a": 1, "b": 2}}]]', [ADD])[1] == [ONE]
    content, calls, errors = r.parse('[[{"f": ]]', [ADD])
    assert (content, calls) == ('[[{"f": ]]', [])
    assert "cannot be read" in errors[0]
