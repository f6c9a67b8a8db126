"""Messages in one form, whichever way they were given, and how much two histories have in common."""

import json
from collections.abc import Collection, Sequence
from typing import Any

from distflow.agents.image_parts import image_part, is_image, value_of
from distflow.agents.reasoning import take_reasoning
from distflow.agents.tool_calls import ToolCall
from distflow.errors import DataError, shown
from distflow.util import data_url

Message = dict[str, Any]  # {role, content, …} as in the chat API; arguments of tool calls are data, not JSON text


def as_chat(messages: Sequence[Message], known: Collection[str]) -> list[Message]:
    """Returns messages with content as text and arguments of tool calls as data, whichever way they were given.

    Images are those of the sample's row, which are `known`, or data URLs.
    """
    if not messages:
        raise DataError("a conversation needs at least one message")
    return [_message(m, known) for m in messages]


def _message(message: Message, known: Collection[str]) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise DataError(f"a message is {shown(message, 60)}; it has a role and content")
    result = {key: value for key, value in message.items() if value is not None}
    result["content"] = _content(message.get("content"), known)
    calls = result.pop("tool_calls", None)
    if not calls:
        return result
    try:
        result["tool_calls"] = [_tool_call(call) for call in calls]
    except (TypeError, KeyError, AttributeError, ValueError, RecursionError):
        raise DataError(
            f'a message has the tool calls {shown(calls, 60)}; one is {{"id", "type", "function": {{"name",'
            ' "arguments"}}}'
        ) from None
    return result


def _tool_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function", call)
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    return ToolCall(str(function["name"]), dict(arguments), str(call.get("id") or "")).message()


def check_tools(tools: Any) -> None:
    """Raises unless these are schemas of functions with names: templates and parsers read them."""
    for tool in tools if isinstance(tools, list | tuple) else [tools]:
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise DataError(
                f'a tool is {shown(tool, 60)}; it is {{"type": "function", "function": {{"name", "description",'
                ' "parameters"}}'
            )


def _content(content: Any, known: Collection[str]) -> str | list[dict[str, Any]]:
    """Returns content as text; as parts if there are images in it, each with its reference."""
    if content is None:
        return ""
    if isinstance(content, list) and all(is_image(p) or _has_text(p) for p in content):
        if any(is_image(p) for p in content):
            return [_image(p, known) if is_image(p) else {"type": "text", "text": p["text"]} for p in content]
        return "".join(p["text"] for p in content)
    if not isinstance(content, str):
        raise DataError(
            f"the content of a message is {shown(content, 60)}; it is text, or a list of parts with text or images"
        )
    return content


def _has_text(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str)


def _image(part: dict[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Returns an image as `known` to the sample, or a data URL: an agent could name any file of the worker."""
    value = value_of(part)
    if not isinstance(value, str) or not (value in known or value.startswith(data_url.PREFIX)):
        raise DataError(f"an image of a message is {shown(value, 60)}; give it as a data URL")
    return image_part(value)


def count_common(known: Sequence[Message], other: Sequence[Message]) -> int:
    """Returns how many messages two histories share from the beginning."""
    n = 0
    while n < min(len(known), len(other)) and _is_same(known[n], other[n]):
        n += 1
    return n


def _is_same(known: Message, sent: Message) -> bool:
    if known["role"] != sent["role"] or _calls(known) != _calls(sent):
        return False
    if known["role"] != "assistant" or isinstance(known["content"], list) or isinstance(sent["content"], list):
        return bool(known["content"] == sent["content"])
    (thought, answer), (sent_thought, sent_answer) = _said(known), _said(sent)
    return answer == sent_answer and (not sent_thought or thought == sent_thought)


def _calls(message: Message) -> list[Any]:
    return [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls") or []]


def _said(message: Message) -> tuple[str, str]:
    """Returns the reasoning of a turn and the rest, without white space around them."""
    thought, answer = take_reasoning(message["content"])
    return (thought or "").strip(), answer.strip()


def same(one: Any, other: Any) -> bool:
    return json.dumps(one, sort_keys=True, default=str) == json.dumps(other, sort_keys=True, default=str)
