"""The bodies of the endpoint's calls and replies, as OpenAI's API and vLLM's token API define them.

Only what bounds a turn is taken from a call: its history, `max_tokens`, stop strings and stop tokens. How a token is
sampled (temperature, top-p, seed) is decided by the run's `rollout` section, because the trainer's log-probs are those
of that distribution. A parameter that would need more than that is refused; one that is not known is ignored.
"""

import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from distflow.errors import DistflowError, shown

Kind = Literal["chat", "completions", "generate"]
Decode = Callable[[Sequence[int]], str]
Json = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_STOPS = 16  # stop strings of a call
_REFUSED = {  # parameter → values that ask for nothing, and the way out
    "n": ((None, 1), "make one call for each choice"),
    "best_of": ((None, 1), "make one call for each choice"),
    "logit_bias": ((None, {}), "leave it out"),
    "response_format": ((None, {"type": "text"}), "ask for the format in the prompt"),
    "functions": ((None, []), "use `tools`"),
    "echo": ((None, False), "leave it out"),
    "suffix": ((None, ""), "leave it out"),
    "prompt_logprobs": ((None, 0), "leave it out"),
}


class CallError(DistflowError):
    """A call that is refused, with the HTTP status of the reply."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> Json:
        kind = "invalid_request_error" if self.status in (400, 404, 405, 413) else "session_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True)
class CallBody:
    """What a call asks for. Exactly one of `messages`, `text` and `token_ids` is the history to continue."""

    kind: Kind
    model: str
    messages: list[Json] | None = None
    tools: list[Json] | None = None
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    stream: bool = False
    stream_usage: bool = False
    logprobs: bool = False
    return_token_ids: bool = False


def parse_body(kind: Kind, raw: bytes, vocabulary: int) -> CallBody:
    """Reads the body of a call; raises CallError with the parameter that is wrong."""
    try:
        body = json.loads(raw)
        if b"\\ud" in raw.lower():  # half of a surrogate pair has no UTF-8, and so no tokens
            json.dumps(body, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as e:
        raise CallError(400, f"the body is not JSON in UTF-8: {type(e).__name__}") from None
    if not isinstance(body, dict):
        raise CallError(400, f"the body is {shown(body)}, not a JSON object")
    if kind == "generate":
        sampling = body.get("sampling_params") or {}
        if not isinstance(sampling, dict):
            raise CallError(400, "`sampling_params` is not an object", "sampling_params")
        body = {**sampling, **{k: v for k, v in body.items() if k != "sampling_params"}}
    for name, (harmless, cure) in _REFUSED.items():
        if body.get(name) not in harmless:
            raise CallError(400, f"`{name}`: {shown(body[name])} is not supported here; {cure}", name)
    return CallBody(kind, str(body.get("model", "")), **_history(kind, body, vocabulary), **_limits(kind, body))


def _history(kind: Kind, body: Mapping[str, Any], vocabulary: int) -> Json:
    if kind == "chat":
        tools = _list(body, "tools") or None
        if any(not isinstance(t, dict) or not isinstance(t.get("function"), dict) for t in tools or ()):
            raise CallError(400, '`tools`: each is {"type": "function", "function": {"name": …}}', "tools")
        if body.get("tool_choice") == "none":
            tools = None
        messages = _list(body, "messages")
        if not messages:
            raise CallError(400, "`messages` is empty or missing", "messages")
        return {"messages": [_message(m, i) for i, m in enumerate(messages)], "tools": tools}
    name = "prompt" if kind == "completions" else "token_ids"
    prompt = body.get(name)
    if kind == "completions" and isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if kind == "completions" and isinstance(prompt, str) and prompt:
        return {"text": prompt}
    if not isinstance(prompt, list) or not prompt or not all(type(t) is int and 0 <= t < vocabulary for t in prompt):
        text = "one text, or " if kind == "completions" else ""
        raise CallError(400, f"`{name}` is not {text}a list of token ids from 0 to {vocabulary - 1}", name)
    return {"token_ids": tuple(prompt)}


def _limits(kind: Kind, body: Mapping[str, Any]) -> Json:
    name = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    most = body.get(name)
    if most is not None and (type(most) is not int or most < 1):
        raise CallError(400, f"`{name}` is {shown(most)}, not a positive number of tokens", name)
    stop = body.get("stop") or []
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or len(stop) > MAX_STOPS or not all(isinstance(s, str) and s for s in stop):
        raise CallError(400, f"`stop` is not a text, nor a list of at most {MAX_STOPS}", "stop")
    ids = _list(body, "stop_token_ids")
    if not all(type(i) is int for i in ids):
        raise CallError(400, "`stop_token_ids` is not a list of token ids", "stop_token_ids")
    stream, options = body.get("stream") or False, body.get("stream_options") or {}
    if kind == "generate" and stream:
        raise CallError(400, "`stream`: tokens come in one piece here; leave it out", "stream")
    return {
        "max_tokens": most,
        "stop": tuple(stop),
        "stop_token_ids": frozenset(ids),
        "stream": bool(stream),
        "stream_usage": isinstance(options, dict) and bool(options.get("include_usage")),
        "logprobs": body.get("logprobs") not in (None, False),
        "return_token_ids": bool(body.get("return_token_ids")),
    }


def _list(body: Mapping[str, Any], name: str) -> list[Any]:
    value = body.get(name) or []
    if not isinstance(value, list):
        raise CallError(400, f"`{name}` is {shown(value)}, not a list", name)
    return value


def _message(message: Any, i: int) -> Json:
    where = f"messages[{i}]"
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise CallError(400, f"`{where}` has no role out of {', '.join(ROLES)}", where)
    return {**message, "role": "system"} if message["role"] == "developer" else message


@dataclass(frozen=True)
class Sampled:
    """The model's turn that answers a call. `finish_reason` is `stop`, `length` or `tool_calls`."""

    content: str
    tool_calls: tuple[tuple[str, str, Json], ...]  # id, name, arguments
    text: str  # raw, before tool calls are parsed
    finish_reason: str
    prompt: Sequence[int]
    tokens: Sequence[int]
    logprobs: Sequence[float]
    weight_version: int


def reply_body(call: CallBody, turn: Sampled, decode: Decode) -> Json:
    """Returns the whole reply to a call that does not stream."""
    choice: Json = {"index": 0, "finish_reason": turn.finish_reason, "logprobs": None}
    if call.logprobs or call.kind == "generate":
        choice["logprobs"] = _logprobs(call.kind, turn, decode)
    if call.kind == "generate":
        return {"request_id": _id("gen"), "choices": [choice | {"token_ids": list(turn.tokens)}], "usage": _usage(turn)}
    head = _head(call, turn)
    if call.return_token_ids:
        choice["token_ids"] = list(turn.tokens)
        head["prompt_token_ids"] = list(turn.prompt)
    if call.kind == "completions":
        choice["text"] = turn.text
        if choice["finish_reason"] == "tool_calls":
            choice["finish_reason"] = "stop"
    else:
        message: Json = {"role": "assistant", "content": turn.content, "refusal": None}
        if turn.tool_calls:
            message["tool_calls"] = _calls(turn)
            message["content"] = turn.content or None
        choice["message"] = message
    return head | {"choices": [choice], "usage": _usage(turn)}


def reply_events(call: CallBody, turn: Sampled, decode: Decode) -> list[bytes]:
    """Returns the server-sent events of a reply that streams: the turn is whole before its first byte is sent."""
    whole = reply_body(call, turn, decode)
    head = {k: v for k, v in whole.items() if k not in ("choices", "usage")}
    [choice] = whole["choices"]
    end = {"finish_reason": choice["finish_reason"]}
    extra = {k: choice[k] for k in ("logprobs", "token_ids") if k in choice}
    deltas: list[Json]
    if call.kind == "completions":
        deltas = [{"text": choice["text"], "finish_reason": None, **extra}, {"text": "", "logprobs": None, **end}]
    else:
        head["object"] = "chat.completion.chunk"
        calls = [{"index": i, **c} for i, c in enumerate(choice["message"].get("tool_calls", []))]
        said = [{"content": turn.content}] * bool(turn.content) + [{"tool_calls": [c]} for c in calls]
        deltas = [{"delta": d, "finish_reason": None} for d in [{"role": "assistant", "content": ""}, *said]]
        deltas[-1] |= extra
        deltas.append({"delta": {}, **end})
    chunks: list[Json] = [head | {"choices": [{"index": 0, **d}]} for d in deltas]
    if call.stream_usage:
        chunks.append(head | {"choices": [], "usage": whole["usage"]})
    events = [b"data: " + json.dumps(c).encode() + b"\n\n" for c in chunks]
    return [*events, b"data: [DONE]\n\n"]


def _head(call: CallBody, turn: Sampled) -> Json:
    name, kind = ("chatcmpl", "chat.completion") if call.kind == "chat" else ("cmpl", "text_completion")
    head = {"id": _id(name), "object": kind, "created": int(time.time()), "model": call.model}
    return head | {"system_fingerprint": f"weights-{turn.weight_version}"}


def _id(name: str) -> str:
    return f"{name}-{uuid.uuid4().hex}"


def _usage(turn: Sampled) -> Json:
    prompt, new = len(turn.prompt), len(turn.tokens)
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


def _calls(turn: Sampled) -> list[Json]:
    return [
        {"id": i, "type": "function", "function": {"name": name, "arguments": json.dumps(args, ensure_ascii=False)}}
        for i, name, args in turn.tool_calls
    ]


def _logprobs(kind: Kind, turn: Sampled, decode: Decode) -> Json:
    """Returns the log-prob of each sampled token; there are none of others, so `top_logprobs` are empty."""
    values = [float(v) for v in turn.logprobs]
    if kind == "completions":
        texts = [decode([t]) for t in turn.tokens]
        starts = [sum(map(len, texts[:i])) for i in range(len(texts))]
        return {"tokens": texts, "token_logprobs": values, "top_logprobs": None, "text_offset": starts}
    rows = []
    for token, value in zip(turn.tokens, values, strict=True):
        text = f"token_id:{token}" if kind == "generate" else decode([token])
        rows.append({"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []})
    return {"content": rows}


def cut_at_stop(tokens: Sequence[int], stop: Sequence[str], decode: Decode) -> tuple[int, bool]:
    """Returns how many of the tokens there are up to the first stop string, and whether there is one.

    The token that completes the string is kept, as a stop token is: what is trained on is what was sampled.
    """
    if not stop or not any(s in decode(tokens) for s in stop):
        return len(tokens), False
    least, most = 1, len(tokens)  # a prefix that has a stop string keeps it when it grows
    while least < most:
        middle = (least + most) // 2
        if any(s in decode(tokens[:middle]) for s in stop):
            most = middle
        else:
            least = middle + 1
    return most, True
