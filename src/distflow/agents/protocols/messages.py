"""Anthropic's Messages API, translated: blocks become messages of a chat, and a turn of the model becomes blocks."""

from collections.abc import Iterator
from typing import Any

from distflow.agents.protocols.call import (
    NOT_STORED,
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
    stops,
    text_of,
)
from distflow.agents.reasoning import with_reasoning
from distflow.errors import shown

_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {  # parameter → values that ask for nothing, and the way out
    "container": ((None,), "leave it out"),
    "mcp_servers": ((None, []), "call the servers from the agent"),
    "output_format": ((None,), "ask for the format in the prompt"),
}
_KNOWN = {
    "model", "messages", "system", "max_tokens", "stop_sequences", "stream", "tools", "tool_choice", "metadata",
    "service_tier", "cache_control", "diagnostics", "context_management", "thread",
}  # fmt: skip
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_TEXTS = ("text",)
_DELTAS: dict[str, tuple[str, Any, str, str]] = {  # type of a block → its field, empty; its deltas, their field
    "text": ("text", "", "text_delta", "text"),
    "thinking": ("thinking", "", "thinking_delta", "thinking"),
    "tool_use": ("input", {}, "input_json_delta", "partial_json"),
}
_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


def _parse(api: Api, body: Json, vocabulary: int) -> CallBody:
    if body.get("max_tokens") is None:
        raise CallError(400, "`max_tokens` is missing", "max_tokens")
    return _read(api, body)


def _parse_count(api: Api, body: Json, vocabulary: int) -> CallBody:
    return _read(api, {**body, "stream": False})


def _read(api: Api, body: Json) -> CallBody:
    check_parameters(body, _KNOWN, _REFUSED)
    output = body.get("output_config")
    if isinstance(output, dict) and output.get("format") is not None:
        kind = shown(output["format"], 60)
        raise CallError(
            400, f"`output_config.format`: {kind} is not supported here; ask for it in the prompt", "output_config"
        )
    _check_context(body.get("context_management"))
    tools = [_tool(t, f"tools[{i}]") for i, t in enumerate(list_of(body, "tools"))]
    given = list_of(body, "messages")
    if not given:
        raise CallError(400, "`messages` is empty or missing", "messages")
    system = text_of(body.get("system"), _TEXTS, "system")
    messages = [m for i, message in enumerate(given) for m in _messages(message, f"messages[{i}]")]
    if not messages or messages[-1]["role"] == "assistant":
        cure = "end with what the model should answer"
        raise CallError(
            400, f"`messages` end with the assistant's: its turn cannot be prefilled here; {cure}", "messages"
        )
    held, previous = _thread(body.get("thread"))
    return CallBody(
        api,
        model=str(body.get("model", "")),
        messages=messages,
        tools=tools if tools and check_choice(body.get("tool_choice")) else None,
        system={"role": "system", "content": system} if system else None,
        previous=previous,
        inherits=True,
        store=held,
        stop=stops(body, "stop_sequences"),
        **limits(body, "max_tokens"),
    )


def _thread(thread: Any) -> tuple[bool, str | None]:
    """Returns whether the conversation is to be held here, and the reply that it continues."""
    match thread:
        case None:
            return False, None
        case {"type": "create"}:
            return True, None
        case {"type": "continue", "previous_message_id": str(previous)}:
            return True, previous
    raise CallError(400, f"`thread` is {shown(thread, 60)}; its type is create or continue", "thread")


def _tool(tool: Any, where: str) -> Json:
    kind = tool.get("type") if isinstance(tool, dict) else tool
    if not isinstance(tool, dict) or kind not in (None, "custom"):
        cure = "give the model tools of your own"
        raise CallError(400, f"`{where}`: a tool of type {shown(kind, 40)} is not supported here; {cure}", where)
    return function_tool(where, tool.get("name"), tool.get("description"), tool.get("input_schema"))


def _messages(message: Any, where: str) -> list[Json]:
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ("user", "assistant", "system"):
        raise CallError(400, f"`{where}` has no role out of user, assistant", where)
    content, where = message.get("content"), f"{where}.content"
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise CallError(400, f"`{where}` is {shown(content, 60)}; it is text, or a list of blocks", where)
    if role == "assistant":
        return [_said(content, where)]
    results = [_result(b, where) for b in content if b.get("type") == "tool_result"]
    rest = [b for b in content if b.get("type") != "tool_result"]
    return [*results, *([{"role": role, "content": content_of(rest, _TEXTS, where)}] if rest or not results else [])]


def _said(blocks: list[Json], where: str) -> Json:
    thoughts = [b.get("thinking") for b in blocks if b.get("type") == "thinking"]
    if not all(isinstance(t, str) for t in thoughts):
        raise CallError(400, f"`{where}` has a thinking block without text", where)
    calls = []
    for block in blocks:
        if block.get("type") == "tool_use":
            name, given = block.get("name"), block.get("input")
            if not isinstance(name, str) or not isinstance(given, dict):
                raise CallError(400, f"`{where}` has a tool_use block without name and input", where)
            calls.append(function_call(block.get("id"), name, arguments_text(given)))
    text = text_of([b for b in blocks if b.get("type") not in ("thinking", "tool_use")], _TEXTS, where)
    thought = "".join(map(str, thoughts)) if thoughts else None
    return {"role": "assistant", "content": with_reasoning(thought, text), **({"tool_calls": calls} if calls else {})}


def _result(block: Json, where: str) -> Json:
    content = content_of(block.get("content"), _TEXTS, f"{where}.tool_result")
    return {"role": "tool", "tool_call_id": str(block.get("tool_use_id")), "content": content}


def _check_context(management: Any) -> None:
    """Raises if old thoughts or results of tools are to be removed here; to keep all thoughts asks for nothing."""
    edits = management.get("edits") or [] if isinstance(management, dict) else []
    for edit in edits if isinstance(edits, list) else [edits]:
        if not isinstance(edit, dict) or edit.get("keep") != "all":
            cure = "compact the history in the agent"
            where = "context_management"
            raise CallError(400, f"`{where}`: {shown(edit, 60)} is not supported here; {cure}", where)


def _reply(call: CallBody, turn: Sampled, decode: Decode) -> Json:
    blocks: list[Json] = []
    if turn.reasoning is not None:
        blocks.append({"type": "thinking", "thinking": turn.reasoning, "signature": ""})
    if turn.answer or not turn.tool_calls:
        blocks.append({"type": "text", "text": turn.answer})
    blocks += [{"type": "tool_use", "id": i, "name": name, "input": args} for i, name, args in turn.tool_calls]
    return {
        "id": new_id("msg"),
        "type": "message",
        "role": "assistant",
        "model": call.model,
        "content": blocks,
        "stop_reason": "stop_sequence" if turn.stop else _STOP_REASONS[turn.finish_reason],
        "stop_sequence": turn.stop,
        "usage": {
            "input_tokens": len(turn.prompt),
            "output_tokens": len(turn.tokens),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
        },
    }


def _events(call: CallBody, whole: Json) -> list[bytes]:
    return [event(e, e["type"]) for e in _stream(whole)]


def _stream(whole: Json) -> Iterator[Json]:
    usage, end = whole["usage"], {key: whole[key] for key in ("stop_reason", "stop_sequence")}
    begun = {**whole, "content": [], "stop_reason": None, "stop_sequence": None, "usage": {**usage, "output_tokens": 0}}
    yield {"type": "message_start", "message": begun}
    for i, block in enumerate(whole["content"]):
        key, blank, kind, part = _DELTAS[block["type"]]
        said = arguments_text(block[key]) if key == "input" else block[key]
        yield {"type": "content_block_start", "index": i, "content_block": {**block, key: blank}}
        yield {"type": "content_block_delta", "index": i, "delta": {"type": kind, part: said}}
        yield {"type": "content_block_stop", "index": i}
    yield {"type": "message_delta", "delta": end, "usage": {"output_tokens": usage["output_tokens"]}}
    yield {"type": "message_stop"}


def _error(error: CallError) -> Json:
    kind = _ERRORS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    details = {"details": {"error_code": "thread_not_found"}} if error.code == NOT_STORED else {}
    return {"type": "error", "error": {"type": kind, "message": str(error), **details}}


MESSAGES = Api(_parse, _reply, _events, _error)
COUNT_TOKENS = Api(_parse_count, _reply, _events, _error)
