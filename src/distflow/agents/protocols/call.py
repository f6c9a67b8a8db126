"""A call of the endpoint, whichever API it came through, and the model's turn that answers it.

Only what bounds a turn is taken from a call: its history, tools, limits of tokens, stop strings and stop tokens. How a
token is sampled (temperature, top-p, seed) is decided by the run's `rollout` section, because the trainer's log-probs
are those of that distribution: parameters that ask for something else are logged. What would need more is refused.
"""

import json
import logging
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from distflow.agents.image_parts import is_image
from distflow.agents.reasoning import take_reasoning
from distflow.errors import DistflowError, shown

logger = logging.getLogger(__name__)

Decode = Callable[[Sequence[int]], str]
Json = dict[str, Any]

NOT_STORED = "previous_response_not_found"  # code of a call that continues a reply that is not held
MAX_STOPS = 16  # stop strings of a call
# How tokens are sampled, or how much of what the model writes.
_SAMPLING = {
    "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "reasoning", "reasoning_effort", "thinking", "verbosity", "output_config", "parallel_tool_calls", "speed",
}  # fmt: skip


class CallError(DistflowError):
    """A call that is refused, with the HTTP status of the reply."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


@dataclass(frozen=True)
class CallBody:
    """A parsed call. Exactly one of `messages`, `text` and `token_ids` is the history to continue."""

    api: "Api"
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
    previous: str | None = None  # the reply, by its id, whose history `messages` continue
    system: Json | None = None  # a message before that history
    inherits: bool = False  # its tools and `system` are those of the call before, where it has none
    store: bool = False  # a later call may continue this one's reply
    given: Mapping[str, Any] = field(default_factory=dict)  # the body, for replies that repeat some of it


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
    stop: str | None = None  # the stop string that ended it

    @property
    def reasoning(self) -> str | None:
        """Returns the reasoning that begins the content, without its marks; None if there is none, or no end of it."""
        return take_reasoning(self.content)[0]

    @property
    def answer(self) -> str:
        """Returns the content after the reasoning."""
        return take_reasoning(self.content)[1]


@dataclass(frozen=True)
class Api:
    """One API of the endpoint: how its calls are read and answered. `parse` raises CallError."""

    parse: Callable[["Api", Json, int], CallBody]  # body, size of the vocabulary
    reply: Callable[[CallBody, Sampled, Decode], Json]
    events: Callable[[CallBody, Json], list[bytes]]  # of a reply that streams, from the whole one
    error: Callable[[CallError], Json]


def parse_body(api: Api, raw: bytes, vocabulary: int) -> CallBody:
    """Reads the body of a call; raises CallError with the parameter that is wrong."""
    try:
        body = json.loads(raw)
        if b"\\ud" in raw.lower():  # half of a surrogate pair has no UTF-8, and so no tokens
            json.dumps(body, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as e:
        raise CallError(400, f"the body is not JSON in UTF-8: {type(e).__name__}") from None
    if not isinstance(body, dict):
        raise CallError(400, f"the body is {shown(body)}, not a JSON object")
    return api.parse(api, body, vocabulary)


def check_parameters(
    body: Mapping[str, Any], known: Collection[str], refused: Mapping[str, tuple[tuple[Any, ...], str]]
) -> None:
    """Refuses parameters by name, and logs once each one that does not act.

    `refused`: parameter → values that ask for nothing, and the way out.
    """
    for name, (harmless, cure) in refused.items():
        if body.get(name) not in harmless:
            raise CallError(400, f"`{name}`: {shown(body[name])} is not supported here; {cure}", name)
    for name, value in body.items():
        if value is None or name in known or name in refused:
            continue
        if name in _SAMPLING:
            warn_once(f"agents set `{name}`, which has no effect: the model is sampled as `rollout` says")
        else:
            warn_once(f"agents set `{name:.40}`, which is not known here and has no effect")


@lru_cache(1024)
def warn_once(message: str) -> None:
    logger.warning("endpoint: %s", message)


def check_choice(choice: Any) -> bool:
    """Returns whether tools are shown to the model; a choice that forces a call cannot be kept, and is logged."""
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if kind not in (None, "auto", "none"):
        warn_once(f"agents set `tool_choice` to {shown(kind, 40)}, which has no effect: the model is free to call")
    if isinstance(choice, dict) and choice.get("disable_parallel_tool_use"):
        warn_once("agents set `disable_parallel_tool_use`, which has no effect: the model is free to call")
    return kind != "none"


def limits(body: Mapping[str, Any], *names: str) -> Json:
    """Reads `max_tokens` by the first of these names that is given, and `stream`."""
    name = next((n for n in names if body.get(n) is not None), names[0])
    most = body.get(name)
    if most is not None and (type(most) is not int or most < 1):
        raise CallError(400, f"`{name}` is {shown(most)}, not a positive number of tokens", name)
    return {"max_tokens": most, "stream": bool(body.get("stream"))}


def stops(body: Mapping[str, Any], name: str) -> tuple[str, ...]:
    stop = body.get(name) or []
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or len(stop) > MAX_STOPS or not all(isinstance(s, str) and s for s in stop):
        raise CallError(400, f"`{name}` is not a text, nor a list of at most {MAX_STOPS}", name)
    return tuple(stop)


def list_of(body: Mapping[str, Any], name: str) -> list[Any]:
    value = body.get(name) or []
    if not isinstance(value, list):
        raise CallError(400, f"`{name}` is {shown(value)}, not a list", name)
    return value


def function_tool(where: str, name: Any, description: Any, parameters: Any) -> Json:
    """Returns a tool as chat templates read it."""
    if not isinstance(name, str) or not name:
        raise CallError(400, f"`{where}` has no name", where)
    function: Json = {"name": name, "description": str(description or ""), "parameters": parameters or {}}
    return {"type": "function", "function": function}


def function_call(number: Any, name: str, arguments: str) -> Json:
    """Returns a call of a tool as OpenAI's messages have it."""
    return {"id": str(number), "type": "function", "function": {"name": name, "arguments": arguments}}


def text_of(content: Any, kinds: Collection[str], where: str) -> str:
    """Returns the text of content that is a text, or a list of parts of these kinds."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise CallError(400, f"`{where}` is {shown(content, 60)}; it is text, or a list of parts", where)
    return "".join(_text(part, kinds, f"{where}[{i}]", where) for i, part in enumerate(content))


def content_of(content: Any, kinds: Collection[str], where: str) -> Any:
    """Returns the text of content; its parts, if there are images among them."""
    if not isinstance(content, list) or not any(map(is_image, content)):
        return text_of(content, kinds, where)
    return [
        part if is_image(part) else {"type": "text", "text": _text(part, kinds, f"{where}[{i}]", where)}
        for i, part in enumerate(content)
    ]


def _text(part: Any, kinds: Collection[str], place: str, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in kinds:
        raise CallError(400, f"`{place}` is of type {shown(kind, 40)}, which is not supported here", where)
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise CallError(400, f"`{place}` has no text", where)
    return text


def new_id(name: str) -> str:
    return f"{name}_{uuid.uuid4().hex}"


def arguments_text(arguments: Json) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def token_logprobs(turn: Sampled, decode: Decode) -> list[Json]:
    """Returns the log-prob of each sampled token; there are none of others, so `top_logprobs` are empty."""
    rows = []
    for token, value in zip(turn.tokens, turn.logprobs, strict=True):
        text = decode([token])
        rows.append({"token": text, "logprob": float(value), "bytes": list(text.encode()), "top_logprobs": []})
    return rows


def openai_error(error: CallError) -> Json:
    kind = "invalid_request_error" if error.status in (400, 404, 405, 413) else "session_error"
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}


def event(data: Json, name: str | None = None) -> bytes:
    """Returns a server-sent event."""
    return (
        (b"" if name is None else b"event: " + name.encode() + b"\n") + b"data: " + json.dumps(data).encode() + b"\n\n"
    )


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
