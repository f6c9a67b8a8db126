"""OpenAI's Responses API, translated: items become the messages of a chat, and a turn of the model becomes items."""

import base64
import binascii
import json
import time
from collections.abc import Iterator
from typing import Any

from distflow.agents.protocols.call import (
    Api,
    CallBody,
    CallError,
    Decode,
    Json,
    Sampled,
    arguments_text,
    check_choice,
    check_parameters,
    content_of,
    event,
    function_call,
    function_tool,
    limits,
    list_of,
    new_id,
    openai_error,
    text_of,
    token_logprobs,
)
from distflow.agents.reasoning import with_reasoning
from distflow.errors import shown

_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {  # parameter → values that ask for nothing, and the way out
    "background": ((None, False), "wait for the reply"),
    "conversation": ((None,), "send the items, or `previous_response_id`"),
    "prompt": ((None,), "send the text as `instructions` or `input`"),
    "truncation": ((None, "disabled"), "leave it out, and shorten the history yourself"),
    "context_management": ((None, []), "compact the history in the agent"),
    "max_tool_calls": ((None,), "count calls in the agent"),
    "image": ((None,), "leave it out"),
    "top_logprobs": ((None, 0), "log-probs are of the tokens that were sampled, alone; leave it out"),
}
_KNOWN = {
    "model", "input", "instructions", "tools", "tool_choice", "max_output_tokens", "stream", "stream_options",
    "previous_response_id", "store", "include", "text", "metadata", "user", "service_tier",
    "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "client_metadata",
}  # fmt: skip
_INCLUDE = ("reasoning.encrypted_content", "message.output_text.logprobs")
_TEXTS = ("input_text", "output_text", "text", "refusal")
_CALLS = ("function_call", "custom_tool_call")
_OUTPUTS = ("function_call_output", "custom_tool_call_output")
_CUSTOM: Json = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


def _parse(api: Api, body: Json, vocabulary: int) -> CallBody:
    check_parameters(body, _KNOWN, _REFUSED)
    text = body.get("text") or {}
    if isinstance(text, dict) and text.get("format") not in (None, {"type": "text"}):
        kind = shown(text["format"], 60)
        raise CallError(400, f"`text.format`: {kind} is not supported here; ask for it in the prompt", "text.format")
    include = list_of(body, "include")
    for name in include:
        if name not in _INCLUDE:
            raise CallError(400, f"`include`: {shown(name, 60)} is not supported here; leave it out", "include")
    previous, instructions = body.get("previous_response_id"), body.get("instructions")
    if not isinstance(previous, str | None):
        raise CallError(400, "`previous_response_id` is no text", "previous_response_id")
    tools = [made for i, t in enumerate(list_of(body, "tools")) for made in _tools(t, f"tools[{i}]")]
    messages = _messages(body.get("input"))
    if not messages:
        raise CallError(400, "`input` is empty or missing", "input")
    return CallBody(
        api,
        model=str(body.get("model", "")),
        messages=messages,
        tools=tools if tools and check_choice(body.get("tool_choice")) else None,
        logprobs="message.output_text.logprobs" in include,
        previous=previous,
        system={"role": "system", "content": text_of(instructions, (), "instructions")} if instructions else None,
        store=body.get("store") is not False,
        given=body,
        **limits(body, "max_output_tokens"),
    )


def _tools(tool: Any, where: str, namespace: str | None = None) -> Iterator[Json]:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind in ("function", "custom"):
        parameters = _CUSTOM if kind == "custom" else tool.get("parameters")  # a custom tool takes free text
        name = _full_name(namespace, tool.get("name"))
        yield function_tool(where, name, tool.get("description"), parameters)
        return
    if kind == "namespace" and namespace is None and isinstance(tool.get("name"), str):
        for i, inner in enumerate(list_of(tool, "tools")):
            yield from _tools(inner, f"{where}.tools[{i}]", tool["name"])
        return
    cure = "give the model functions of your own"
    raise CallError(400, f"`{where}`: a tool of type {shown(kind, 40)} is not supported here; {cure}", where)


def _full_name(namespace: Any, name: Any) -> Any:
    """Returns the name by which the model knows a tool."""
    return f"{namespace}__{name}" if namespace and name else name


def _messages(given: Any) -> list[Json]:
    if isinstance(given, str):
        return [{"role": "user", "content": given}] if given else []
    if not isinstance(given, list):
        raise CallError(400, f"`input` is {shown(given, 60)}; it is text, or a list of items", "input")
    messages: list[Json] = []
    said: _Said | None = None  # by the model in the turn that is being read
    for i, item in enumerate(given):
        where = f"input[{i}]"
        if not isinstance(item, dict):
            raise CallError(400, f"`{where}` is {shown(item, 60)}, not an item", where)
        kind = item.get("type", "message")
        if kind in ("reasoning", *_CALLS) or (kind == "message" and item.get("role") == "assistant"):
            if said is None or not said.takes(kind):
                said = _Said()
                messages.append(said.message)
            said.add(kind, item, where)
        else:
            said = None
            messages.append(_other(kind, item, where))
    return messages


class _Said:
    """A turn of the model, from the items that it was given as: its reasoning, its text, then its calls."""

    def __init__(self) -> None:
        self.message: Json = {"role": "assistant", "content": ""}
        self._reasoning: str | None = None
        self._text: str | None = None

    def takes(self, kind: str) -> bool:
        calls = "tool_calls" in self.message
        if kind == "reasoning":
            return False
        return kind in _CALLS or (self._text is None and not calls)

    def add(self, kind: str, item: Json, where: str) -> None:
        if kind == "reasoning":
            self._reasoning = _thought(item, where)
        elif kind == "message":
            self._text = text_of(item.get("content"), _TEXTS, f"{where}.content")
        else:
            name, call_id = _full_name(item.get("namespace"), item.get("name")), item.get("call_id")
            custom = kind == "custom_tool_call"
            arguments = json.dumps({"input": item.get("input")}) if custom else item.get("arguments")
            if not isinstance(name, str) or not isinstance(arguments, str):
                raise CallError(400, f"`{where}` has no name, or no arguments as text", where)
            self.message.setdefault("tool_calls", []).append(function_call(call_id, name, arguments))
        self.message["content"] = with_reasoning(self._reasoning, self._text or "")


def _thought(item: Json, where: str) -> str | None:
    """Returns the text of a reasoning item; None if it has none, such as another model's."""
    if content := item.get("content"):
        return text_of(content, ("reasoning_text", "text"), f"{where}.content")
    try:
        sealed = item.get("encrypted_content") or ""
        return base64.b64decode(sealed, validate=True).decode() if sealed else None
    except (binascii.Error, ValueError, TypeError):
        what = "its `encrypted_content` is not from here"
        raise CallError(400, f"`{where}`: {what}; send the reasoning items of this endpoint", where) from None


def _other(kind: Any, item: Json, where: str) -> Json:
    if kind == "message" and item.get("role") in ("user", "system", "developer"):
        role = "user" if item["role"] == "user" else "system"
        return {"role": role, "content": content_of(item.get("content"), _TEXTS, f"{where}.content")}
    if kind in _OUTPUTS:
        content = content_of(item.get("output"), _TEXTS, f"{where}.output")
        return {"role": "tool", "tool_call_id": str(item.get("call_id")), "content": content}
    if kind == "item_reference":
        cure = "send the item itself, or `previous_response_id`"
    elif kind == "message":
        raise CallError(400, f"`{where}` has no role out of user, assistant, system, developer", where)
    else:
        cure = "leave it out"
    raise CallError(400, f"`{where}`: an item of type {shown(kind, 40)} is not supported here; {cure}", where)


def _reply(call: CallBody, turn: Sampled, decode: Decode) -> Json:
    cut = turn.finish_reason == "length"
    prompt, new = len(turn.prompt), len(turn.tokens)
    given = call.given
    return {
        "id": new_id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "error": None,
        "instructions": given.get("instructions"),
        "max_output_tokens": call.max_tokens,
        "metadata": given.get("metadata") or {},
        "model": call.model,
        "output": _items(call, turn, decode),
        "parallel_tool_calls": True,
        "previous_response_id": call.previous,
        "store": call.store,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto" if call.tools else "none",
        "tools": given.get("tools") or [],
        "truncation": "disabled",
        "usage": {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": new,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + new,
        },
    }


def _items(call: CallBody, turn: Sampled, decode: Decode) -> list[Json]:
    status = "incomplete" if turn.finish_reason == "length" else "completed"
    known = {_full_name(n, t["name"]): (n, t) for n, t in _given_tools(call.given.get("tools") or [])}
    items: list[Json] = []
    if turn.reasoning is not None:
        content = [{"type": "reasoning_text", "text": turn.reasoning}]
        item: Json = {"type": "reasoning", "id": new_id("rs"), "summary": [], "content": content, "status": "completed"}
        if "reasoning.encrypted_content" in (call.given.get("include") or ()):
            item["encrypted_content"] = base64.b64encode(turn.reasoning.encode()).decode()
        items.append(item)
    if turn.answer or not turn.tool_calls:
        rows = token_logprobs(turn, decode) if call.logprobs else []
        part = {"type": "output_text", "text": turn.answer, "annotations": [], "logprobs": rows}
        message = {"type": "message", "id": new_id("msg"), "role": "assistant", "status": status, "content": [part]}
        items.append(message)
    for number, name, arguments in turn.tool_calls:
        namespace, tool = known.get(name, (None, {"name": name}))
        if tool.get("type") == "custom":
            text = arguments.get("input")
            what = {"type": "custom_tool_call", "input": text if isinstance(text, str) else arguments_text(arguments)}
        else:
            what = {"type": "function_call", "arguments": arguments_text(arguments), "status": "completed"}
        within = {"namespace": namespace} if namespace else {}
        items.append({"id": new_id("fc"), "call_id": number, "name": tool["name"], **within, **what})
    return items


def _given_tools(tools: list[Json]) -> Iterator[tuple[str | None, Json]]:
    """Yields each tool of a call with its namespace."""
    for tool in tools:
        if tool["type"] == "namespace":
            yield from ((tool["name"], inner) for inner in tool["tools"])
        else:
            yield None, tool


def _events(call: CallBody, whole: Json) -> list[bytes]:
    started = {**whole, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    events: list[Json] = [{"type": f"response.{name}", "response": started} for name in ("created", "in_progress")]
    for i, item in enumerate(whole["output"]):
        at = {"output_index": i, "item_id": item["id"]}
        events.append({"type": "response.output_item.added", "output_index": i, "item": _empty(item)})
        events += _text_events(item, at) if "content" in item else _call_events(item, at)
        events.append({"type": "response.output_item.done", "output_index": i, "item": item})
    events.append({"type": f"response.{whole['status']}", "response": whole})
    return [event({**e, "sequence_number": i}, e["type"]) for i, e in enumerate(events)]


def _empty(item: Json) -> Json:
    blank = {"content": [], "arguments": "", "input": "", "status": "in_progress"}
    return {**item, **{k: v for k, v in blank.items() if k in item}}


def _text_events(item: Json, at: Json) -> Iterator[Json]:
    [part] = item["content"]
    what, at = f"response.{part['type']}", {**at, "content_index": 0}
    blank = {**part, "text": ""} | ({"logprobs": []} if "logprobs" in part else {})
    rows = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
    yield {"type": "response.content_part.added", **at, "part": blank}
    yield {"type": f"{what}.delta", **at, "delta": part["text"], **rows}
    yield {"type": f"{what}.done", **at, "text": part["text"], **rows}
    yield {"type": "response.content_part.done", **at, "part": part}


def _call_events(item: Json, at: Json) -> Iterator[Json]:
    key = "input" if item["type"] == "custom_tool_call" else "arguments"
    what = f"response.{item['type']}_{key}"
    yield {"type": f"{what}.delta", **at, "delta": item[key]}
    yield {"type": f"{what}.done", **at, "name": item["name"], key: item[key]}


RESPONSES = Api(_parse, _reply, _events, openai_error)
