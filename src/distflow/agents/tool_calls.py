"""Tool calls in what a model wrote, in the formats of Qwen, Hermes, Llama and Mistral, and as plain JSON.

A parser never raises: a call that cannot be read becomes an error text, which is told to the model.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from distflow.agents.reasoning import THINK, THINK_END
from distflow.errors import ConfigError, cut, suggest

Tools = Sequence[dict[str, Any]]  # JSON schemas, as the chat template gets them
Parsed = tuple[str, "list[ToolCall]", list[str]]  # the text around the calls, the calls, errors of malformed ones
_SHOWN = 80  # characters of a malformed call in its error


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: dict[str, Any]
    id: str = ""  # is given by the session

    def message(self) -> dict[str, Any]:
        """Returns the call as chat templates read it; its arguments are data, not text."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class ToolParser(Protocol):
    def __call__(self, text: str, tools: Tools = ()) -> Parsed: ...


class MalformedError(Exception):
    """A tool call cannot be read; the message is for the model."""


def hermes(text: str, tools: Tools = ()) -> Parsed:
    """Reads `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, as Hermes and Qwen write it."""
    return _between_tags(text, lambda body: _json_call(body))


def qwen_xml(text: str, tools: Tools = ()) -> Parsed:
    """Reads `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>` (Qwen3-Coder)."""
    return _between_tags(text, lambda body: _xml_call(body, tools))


def llama(text: str, tools: Tools = ()) -> Parsed:
    """Reads `{"name": …, "parameters": {…}}`, several with `;` between them, after `<|python_tag|>` or alone."""
    before, tag, body = text.partition("<|python_tag|>")
    if tag:
        return _catch(before.strip(), body, _json_calls)
    return plain_json(text)


def mistral(text: str, tools: Tools = ()) -> Parsed:
    """Reads `[TOOL_CALLS] [{"name": …, "arguments": {…}}, …]`."""
    before, tag, body = text.partition("[TOOL_CALLS]")
    return _catch(before.strip(), body, _json_calls) if tag else (text, [], [])


def plain_json(text: str, tools: Tools = ()) -> Parsed:
    """Reads a text that is nothing but a call or a list of calls in JSON, also in a Markdown fence."""
    body = text.strip()
    if fence := re.fullmatch(r"```(?:json)?\s*(.*?)\s*```", body, re.DOTALL):
        body = fence[1]
    if not (body[:1] in "{[" and '"name"' in body and re.search(r'"(arguments|parameters)"', body)):
        return text, [], []  # an answer, which may be JSON too
    return _catch("", body, _json_calls)


def tags_or_json(text: str, tools: Tools = ()) -> Parsed:
    """Reads calls in `<tool_call>` tags if there are any, else plain JSON."""
    if "<tool_call>" not in text:
        return plain_json(text)
    return qwen_xml(text, tools) if "<function=" in text else hermes(text)


PARSERS: dict[str, ToolParser] = {
    "hermes": hermes,
    "qwen": hermes,
    "qwen_xml": qwen_xml,
    "llama": llama,
    "mistral": mistral,
    "json": plain_json,
}


def parser_for(tokenizer: Any, name: str = "auto") -> ToolParser:
    """Returns the parser of this name; `auto` takes the one whose format the tokenizer's chat template writes.

    A tokenizer with a `response_template` of its own is read by transformers, as its authors meant.
    """
    if name != "auto":
        if name not in PARSERS:
            raise ConfigError(
                f"environment.tool_parser: there is no parser '{name}'{suggest(name, [*PARSERS, 'auto'])}"
            )
        return PARSERS[name]
    if getattr(tokenizer, "response_template", None) is not None:
        return _by_transformers(tokenizer)
    templates = getattr(tokenizer, "chat_template", None) or ""
    template = "\n".join(templates.values()) if isinstance(templates, dict) else templates
    for mark, parser in _MARKS:
        if mark in template:
            return parser
    return tags_or_json


_MARKS: list[tuple[str, ToolParser]] = [
    ("<function=", qwen_xml),
    ("<tool_call>", hermes),
    ("[TOOL_CALLS]", mistral),
    ("<|python_tag|>", llama),
    ('"parameters"', llama),
]


def split_reasoning(text: str, opened: bool) -> tuple[str, str]:
    """Returns the reasoning at the beginning of a turn and the rest: a call that is only thought of is none.

    Reasoning is `opened` if the generation prompt has `<think>`, or by the model itself.
    """
    if not opened and not text.lstrip().startswith(THINK):
        return "", text
    thought, end, rest = text.partition(THINK_END)
    return thought + end, rest


def _between_tags(text: str, read: Callable[[str], tuple[ToolCall, int]]) -> Parsed:
    """Reads each `<tool_call>…</tool_call>`; `read` returns the call and where in the text after the tag it ends."""
    content, calls, errors = "", [], []
    start, end = "<tool_call>", "</tool_call>"
    while start in text:
        before, _, text = text.partition(start)
        content += before
        try:
            call, length = read(text)
            rest = text[length:].lstrip()
            if rest and not rest.startswith(end):
                raise MalformedError(f"there is more than one JSON object in a tool call, or no {end} after it")
            calls.append(call)
            text = rest.removeprefix(end)
        except MalformedError as e:
            body, _, text = text.partition(end)
            errors.append(f"{e}: {cut(body, _SHOWN)}")
    if not calls and not errors:
        return content + text, [], []
    return (content + text).strip(), calls, errors


def _json_call(text: str) -> tuple[ToolCall, int]:
    value, end = _decode(text, len(text) - len(text.lstrip()))
    return _call(value), end


def _json_calls(text: str) -> list[ToolCall]:
    """Reads one call, a list of calls, or several with `;`, `,` or white space between them."""
    calls: list[ToolCall] = []
    at = 0
    while at < len(text):
        if text[at].isspace() or text[at] in ";,":
            at += 1
            continue
        value, at = _decode(text, at)
        calls += map(_call, value if isinstance(value, list) else [value])
    if not calls:
        raise MalformedError("a tool call has no JSON object")
    return calls


def _decode(text: str, at: int) -> tuple[Any, int]:
    try:
        return _DECODER.raw_decode(text, at)
    except json.JSONDecodeError as e:
        raise MalformedError(f"a tool call is not valid JSON ({e.msg} at character {e.pos - at})") from None
    except (ValueError, RecursionError) as e:  # a constant, too many digits, too deep
        raise MalformedError(f"a tool call is not valid JSON ({e})") from None


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON number")


_DECODER = json.JSONDecoder(parse_constant=_refuse)


def _call(value: Any) -> ToolCall:
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict):
        raise MalformedError('a tool call is a JSON object {"name": …, "arguments": {…}}')
    name = value.get("name")
    if not isinstance(name, str) or not name.strip():
        raise MalformedError('a tool call has no "name"')
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str) and arguments.strip():  # as OpenAI writes them: JSON in a string
        arguments, _ = _decode(arguments, len(arguments) - len(arguments.lstrip()))
    if arguments in (None, "", []):
        arguments = {}
    if not isinstance(arguments, dict):
        raise MalformedError(f"the arguments of the tool call '{cut(name, 40)}' are not a JSON object")
    try:
        json.dumps([name, arguments], ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        raise MalformedError("a tool call has a lone surrogate, which is no text") from None
    return ToolCall(name.strip(), arguments)


_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>")
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


def _xml_call(text: str, tools: Tools) -> tuple[ToolCall, int]:
    if not (function := _FUNCTION.match(text)):
        raise MalformedError("a tool call does not begin with <function=name>")
    name, at, arguments = function[1].strip(), function.end(), {}
    types = _types(name, tools)
    while parameter := _PARAMETER.match(text, at):
        key = parameter[1].strip()
        arguments[key] = _typed(parameter[2], types.get(key))
        at = parameter.end()
    closing = re.compile(r"\s*</function>").match(text, at)
    if not closing:
        raise MalformedError("a tool call does not end with </function>")
    return ToolCall(name, arguments), closing.end()


def _types(name: str, tools: Tools) -> dict[str, Any]:
    """Returns the JSON types of a tool's parameters, by name."""
    for tool in tools:
        function = tool.get("function", tool)
        if function.get("name") == name:
            properties = (function.get("parameters") or {}).get("properties") or {}
            return {key: schema.get("type") for key, schema in properties.items() if isinstance(schema, dict)}
    return {}


def _typed(value: str, kind: Any) -> Any:
    """Returns a parameter as its schema has it: text stays text, the rest is JSON if it can be read as such."""
    if kind in (None, "string"):
        return value
    try:
        return _decode(value.strip(), 0)[0]
    except MalformedError:
        lowered = value.strip().lower()
        return lowered == "true" if lowered in ("true", "false") else value


def _catch(content: str, body: str, read: Callable[[str], list[ToolCall]]) -> Parsed:
    try:
        return content, read(body), []
    except MalformedError as e:
        return content, [], [f"{e}: {cut(body, _SHOWN)}"]


def _by_transformers(tokenizer: Any) -> ToolParser:
    def parse(text: str, tools: Tools = ()) -> Parsed:
        try:
            message = tokenizer.parse_response(text, prefix="", tools=list(tools))
        except Exception as e:  # the template is the model's: what it raises is about this text
            return text, [], [f"a tool call cannot be read ({cut(str(e), _SHOWN)}): {cut(text, _SHOWN)}"]
        calls, errors = [], []
        for value in message.get("tool_calls") or []:
            try:
                calls.append(_call(value))
            except MalformedError as e:
                errors.append(f"{e}: {cut(json.dumps(value, default=str), _SHOWN)}")
        return str(message.get("content") or ""), calls, errors

    return parse
