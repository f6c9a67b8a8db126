"""OpenAI's Chat Completions and Completions, and vLLM's API for tokens."""

import time
from collections.abc import Mapping
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
    event,
    function_call,
    limits,
    list_of,
    new_id,
    openai_error,
    stops,
    token_logprobs,
)

ROLES = ("system", "developer", "user", "assistant", "tool")
_REFUSED = {  # parameter → values that ask for nothing, and the way out
    "n": ((None, 1), "make one call for each choice"),
    "best_of": ((None, 1), "make one call for each choice"),
    "logit_bias": ((None, {}), "leave it out"),
    "response_format": ((None, {"type": "text"}), "ask for the format in the prompt"),
    "functions": ((None, []), "use `tools`"),
    "echo": ((None, False), "leave it out"),
    "suffix": ((None, ""), "leave it out"),
    "prompt_logprobs": ((None, 0), "leave it out"),
    "audio": ((None,), "leave it out"),
    "modalities": ((None, ["text"]), "leave it out"),
    "web_search_options": ((None,), "give the model a tool of your own"),
    "top_logprobs": ((None, 0), "log-probs are of the tokens that were sampled, alone; leave it out"),
    **dict.fromkeys(
        ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"),
        ((None,), "ask for the format in the prompt"),
    ),
    **dict.fromkeys(
        ("bad_words", "allowed_token_ids", "logits_processors", "documents", "truncate_prompt_tokens"),
        ((None, []), "leave it out"),
    ),
    "min_tokens": ((None, 0), "set `rollout.min_tokens`"),
    "ignore_eos": ((None, False), "leave it out"),
    "use_beam_search": ((None, False), "leave it out"),
    "chat_template": ((None,), "the model's own is used; leave it out"),
    "chat_template_kwargs": ((None, {}), "set `data.chat_template_kwargs`"),
    "add_generation_prompt": ((None, True), "end with what the model should answer"),
    "continue_final_message": ((None, False), "end with what the model should answer"),
}
_KNOWN = {
    "model", "messages", "prompt", "token_ids", "tools", "tool_choice", "max_tokens", "max_completion_tokens",
    "stop", "stop_token_ids", "stream", "stream_options", "logprobs", "return_token_ids", "user",
    "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "request_id",
    "skip_special_tokens",
}  # fmt: skip


def _parse_chat(api: Api, body: Json, vocabulary: int) -> CallBody:
    check_parameters(body, _KNOWN, _REFUSED)
    tools = list_of(body, "tools") or None
    if any(not isinstance(t, dict) or not isinstance(t.get("function"), dict) for t in tools or ()):
        raise CallError(400, '`tools`: each is {"type": "function", "function": {"name": …}}', "tools")
    if not check_choice(body.get("tool_choice")):
        tools = None
    messages = list_of(body, "messages")
    if not messages:
        raise CallError(400, "`messages` is empty or missing", "messages")
    return CallBody(api, messages=[_message(m, i) for i, m in enumerate(messages)], tools=tools, **_limits(body))


def _parse_completions(api: Api, body: Json, vocabulary: int) -> CallBody:
    check_parameters(body, _KNOWN, _REFUSED)
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return CallBody(api, text=prompt, **_limits(body))
    return CallBody(api, token_ids=_tokens(prompt, "prompt", "one text, or ", vocabulary), **_limits(body))


def _parse_generate(api: Api, body: Json, vocabulary: int) -> CallBody:
    sampling = body.get("sampling_params") or {}
    if not isinstance(sampling, dict):
        raise CallError(400, "`sampling_params` is not an object", "sampling_params")
    body = {**sampling, **{k: v for k, v in body.items() if k != "sampling_params"}}
    check_parameters(body, _KNOWN, _REFUSED)
    if body.get("stream"):
        raise CallError(400, "`stream`: tokens come in one piece here; leave it out", "stream")
    return CallBody(api, token_ids=_tokens(body.get("token_ids"), "token_ids", "", vocabulary), **_limits(body))


def _tokens(tokens: Any, name: str, or_text: str, vocabulary: int) -> tuple[int, ...]:
    if not isinstance(tokens, list) or not tokens or not all(type(t) is int and 0 <= t < vocabulary for t in tokens):
        raise CallError(400, f"`{name}` is not {or_text}a list of token ids from 0 to {vocabulary - 1}", name)
    return tuple(tokens)


def _limits(body: Mapping[str, Any]) -> Json:
    ids = list_of(body, "stop_token_ids")
    if not all(type(i) is int for i in ids):
        raise CallError(400, "`stop_token_ids` is not a list of token ids", "stop_token_ids")
    options = body.get("stream_options") or {}
    return {
        "model": str(body.get("model", "")),
        **limits(body, "max_completion_tokens", "max_tokens"),
        "stop": stops(body, "stop"),
        "stop_token_ids": frozenset(ids),
        "stream_usage": isinstance(options, dict) and bool(options.get("include_usage")),
        "logprobs": body.get("logprobs") not in (None, False),
        "return_token_ids": bool(body.get("return_token_ids")),
    }


def _message(message: Any, i: int) -> Json:
    where = f"messages[{i}]"
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise CallError(400, f"`{where}` has no role out of {', '.join(ROLES)}", where)
    return {**message, "role": "system"} if message["role"] == "developer" else message


def _reply_chat(call: CallBody, turn: Sampled, decode: Decode) -> Json:
    message: Json = {"role": "assistant", "content": turn.content, "refusal": None}
    if turn.tool_calls:
        message["tool_calls"] = [
            function_call(number, name, arguments_text(args)) for number, name, args in turn.tool_calls
        ]
        message["content"] = turn.content or None
    rows = {"content": token_logprobs(turn, decode)} if call.logprobs else None
    choice = {"index": 0, "finish_reason": turn.finish_reason, "logprobs": rows, "message": message}
    return _whole(call, turn, "chatcmpl", "chat.completion", choice)


def _reply_completions(call: CallBody, turn: Sampled, decode: Decode) -> Json:
    reason = "stop" if turn.finish_reason == "tool_calls" else turn.finish_reason
    rows: Json | None = None
    if call.logprobs:
        texts = [decode([t]) for t in turn.tokens]
        starts = [sum(map(len, texts[:i])) for i in range(len(texts))]
        values = [float(v) for v in turn.logprobs]
        rows = {"tokens": texts, "token_logprobs": values, "top_logprobs": None, "text_offset": starts}
    choice = {"index": 0, "finish_reason": reason, "logprobs": rows, "text": turn.text}
    return _whole(call, turn, "cmpl", "text_completion", choice)


def _reply_generate(call: CallBody, turn: Sampled, decode: Decode) -> Json:
    rows = []
    for token, value in zip(turn.tokens, turn.logprobs, strict=True):
        text = f"token_id:{token}"
        rows.append({"token": text, "logprob": float(value), "bytes": list(text.encode()), "top_logprobs": []})
    choice = {"index": 0, "finish_reason": turn.finish_reason, "logprobs": {"content": rows}}
    return {
        "request_id": new_id("gen"),
        "choices": [choice | {"token_ids": list(turn.tokens)}],
        "usage": _usage(turn),
    }


def _whole(call: CallBody, turn: Sampled, name: str, kind: str, choice: Json) -> Json:
    reply = {"id": new_id(name), "object": kind, "created": int(time.time()), "model": call.model}
    reply["system_fingerprint"] = f"weights-{turn.weight_version}"
    if call.return_token_ids:
        choice["token_ids"] = list(turn.tokens)
        reply["prompt_token_ids"] = list(turn.prompt)
    return reply | {"choices": [choice], "usage": _usage(turn)}


def _usage(turn: Sampled) -> Json:
    prompt, new = len(turn.prompt), len(turn.tokens)
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


def _events_chat(call: CallBody, whole: Json) -> list[bytes]:
    [choice] = whole["choices"]
    message = choice["message"]
    calls = [{"index": i, **c} for i, c in enumerate(message.get("tool_calls", []))]
    said = [{"content": message["content"]}] * bool(message["content"]) + [{"tool_calls": [c]} for c in calls]
    deltas: list[Json] = [{"delta": d, "finish_reason": None} for d in [{"role": "assistant", "content": ""}, *said]]
    deltas[-1] |= {k: choice[k] for k in ("logprobs", "token_ids") if k in choice}
    deltas.append({"delta": {}, "finish_reason": choice["finish_reason"]})
    return _chunks(call, {**whole, "object": "chat.completion.chunk"}, deltas)


def _events_completions(call: CallBody, whole: Json) -> list[bytes]:
    [choice] = whole["choices"]
    extra = {k: choice[k] for k in ("logprobs", "token_ids") if k in choice}
    first = {"text": choice["text"], "finish_reason": None, **extra}
    return _chunks(call, whole, [first, {"text": "", "logprobs": None, "finish_reason": choice["finish_reason"]}])


def _chunks(call: CallBody, whole: Json, deltas: list[Json]) -> list[bytes]:
    head = {k: v for k, v in whole.items() if k not in ("choices", "usage")}
    chunks: list[Json] = [head | {"choices": [{"index": 0, **d}]} for d in deltas]
    if call.stream_usage:
        chunks.append(head | {"choices": [], "usage": whole["usage"]})
    return [*map(event, chunks), b"data: [DONE]\n\n"]


CHAT = Api(_parse_chat, _reply_chat, _events_chat, openai_error)
COMPLETIONS = Api(_parse_completions, _reply_completions, _events_completions, openai_error)
GENERATE = Api(_parse_generate, _reply_generate, lambda call, whole: [], openai_error)
