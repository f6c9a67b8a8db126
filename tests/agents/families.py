"""Tokenizers with chat templates in the form of four model families, and of one that knows no tools."""

import json
from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from transformers import PreTrainedTokenizerFast

from distflow.agents.rendering import Renderer
from distflow.model.source import Source
from distflow.model.text import Text
from distflow.model.tokenizer import train_tokenizer
from distflow.rollout.engine import Completion

# Strips the reasoning of turns before the last question; a default system prompt; results in a user's turn.
_QWEN = """
{%- if tools -%}
<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}# Tools
<tools>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
</tools>
Write <tool_call>{"name": …, "arguments": …}</tool_call>.<|im_end|>
{% else -%}
<|im_start|>system
{{ messages[0].content if messages[0].role == 'system' else 'You are a helpful assistant.' }}<|im_end|>
{% endif -%}
{%- set ns = namespace(last=-1) -%}
{%- for m in messages if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endfor -%}
{%- set seen = namespace(users=-1) -%}
{%- for m in messages -%}
{%- if m.role == 'user' -%}
{%- set seen.users = seen.users + 1 -%}
<|im_start|>user
{{ m.content }}<|im_end|>
{% elif m.role == 'assistant' -%}
{%- set content = m.content -%}
{%- set reasoning = '' -%}
{%- if '</think>' in content -%}
{%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\\n') -%}
{%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
<|im_start|>assistant
{% if seen.users == ns.last and (loop.last or reasoning) -%}
<think>
{{ reasoning }}
</think>

{% endif %}{{ content }}
{%- for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% elif m.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}<|im_start|>user{% endif %}
{{- '\\n<tool_response>\\n' }}{{ m.content }}{{ '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}
"""

# Trims content; calls are JSON with "parameters"; refuses two calls in a turn; results have the role ipython.
_LLAMA = """
{{- bos_token -}}
{%- if messages[0].role == 'system' %}{% set system = messages[0].content | trim %}{% set messages = messages[1:] -%}
{%- else %}{% set system = '' %}{% endif -%}
<|start_header_id|>system<|end_header_id|>

Cutting Knowledge Date: December 2023

{{ system }}<|eot_id|>
{%- for m in messages -%}
{%- if m.tool_calls -%}
{%- if m.tool_calls | length != 1 -%}
{{ raise_exception('This model only supports single tool-calls at once!') }}
{%- endif -%}
{%- set call = m.tool_calls[0].function -%}
<|start_header_id|>assistant<|end_header_id|>

{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}<|eot_id|>
{%- elif m.role in ['tool', 'ipython'] -%}
<|start_header_id|>ipython<|end_header_id|>

{{ m.content }}<|eot_id|>
{%- else -%}
<|start_header_id|>{{ m.role }}<|end_header_id|>

{% if loop.first and tools -%}
Given these functions, answer with {"name": function, "parameters": arguments}.

{% for tool in tools %}{{ tool | tojson(indent=4) }}

{% endfor %}{% endif %}{{ m.content | trim }}<|eot_id|>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start_header_id|>assistant<|end_header_id|>

{% endif -%}
"""

# Every role alike, a `tool` role of its own, calls in tags.
_HERMES = """
{{- bos_token -}}
<|im_start|>system
{% if tools %}You call functions: <tools>{% for tool in tools %} {{ tool.function | tojson }}{% endfor %} </tools>
{% endif %}{{ messages[0].content if messages[0].role == 'system' else 'You are Hermes.' }}<|im_end|>
{% for m in messages if m.role != 'system' -%}
<|im_start|>{{ m.role }}
{% if m.role == 'tool' %}<tool_response>
{% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}
<tool_call>
{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
</tool_call>
{%- endfor -%}
{{- '\\n</tool_response>' if m.role == 'tool' }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}
"""

# Alternates strictly; a space before what the assistant says; results need the nine characters of their call's id.
_MISTRAL = """
{%- set system = messages[0].content + '\\n\\n' if messages[0].role == 'system' else '' -%}
{%- if system %}{% set messages = messages[1:] %}{% endif -%}
{%- set ns = namespace(user=true) -%}
{%- for m in messages if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) -%}
{%- if (m.role == 'user') != ns.user -%}
{{ raise_exception('After the optional system message, conversation roles must alternate user/assistant') }}
{%- endif -%}
{%- set ns.user = not ns.user -%}
{%- endfor -%}
{{- bos_token -}}
{%- for m in messages -%}
{%- if m.role == 'user' -%}
{%- if tools and loop.first %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif -%}
[INST] {{ system if loop.first }}{{ m.content }}[/INST]
{%- elif m.role == 'tool' -%}
{%- if m.tool_call_id is not defined or m.tool_call_id | length != 9 -%}
{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
{%- endif -%}
[TOOL_RESULTS] {"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]
{%- elif m.tool_calls -%}
[TOOL_CALLS] [
{%- for call in m.tool_calls -%}
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, "id": "{{ call.id }}"}
{{- ', ' if not loop.last -}}
{%- endfor %}]{{ eos_token }}
{%- else %} {{ m.content | trim }}{{ eos_token }}
{%- endif -%}
{%- endfor -%}
"""

# Neither a system prompt nor tools; the assistant is called the model.
_GEMMA = """
{{- bos_token -}}
{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif -%}
{%- for m in messages -%}
{%- if m.role not in ['user', 'assistant'] or (m.role == 'user') != (loop.index0 % 2 == 0) -%}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif -%}
<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}
{{ m.content | trim }}<end_of_turn>
{% endfor -%}
{%- if add_generation_prompt -%}<start_of_turn>model
{% endif -%}
"""

_CHATML = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
_FAMILIES: dict[str, tuple[str, list[str], list[str], str]] = {  # template, special and other tokens, end of a turn
    "qwen": (
        _QWEN,
        _CHATML,
        ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"],
        "<|im_end|>",
    ),
    "llama": (
        _LLAMA,
        ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>"],
        [],
        "<|eot_id|>",
    ),
    "hermes": (_HERMES, _CHATML, [], "<|im_end|>"),
    "mistral": (
        _MISTRAL,
        [f"[{slash}{name}]" for slash in ("", "/") for name in ("INST", "TOOL_RESULTS", "AVAILABLE_TOOLS")]
        + ["[TOOL_CALLS]", "</s>"],
        [],
        "</s>",
    ),
    "gemma": (_GEMMA, ["<start_of_turn>", "<end_of_turn>"], [], "<end_of_turn>"),
}
WITH_TOOLS = ("qwen", "llama", "hermes", "mistral")
FAMILIES = tuple(_FAMILIES)

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}

_TEXTS = ["You are a helpful assistant. The result is 42, and the answer follows from the tool call.\n\n"] * 3


@cache
def tokenizer(family: str) -> PreTrainedTokenizerFast:
    template, special, added, end = _FAMILIES[family]
    made = train_tokenizer(iter([*_TEXTS, template]), 500)
    made.add_special_tokens({"additional_special_tokens": special, "bos_token": "<bos>"})
    made.add_tokens(added)
    made.eos_token = end
    made.chat_template = template
    return made


def renderer(family: str, limit: int = 4000, **changes: Any) -> Renderer:
    """A renderer for a family; `changes` are attributes of its tokenizer, such as another template."""
    made = tokenizer(family)
    if changes:
        made = PreTrainedTokenizerFast(tokenizer_object=made.backend_tokenizer, eos_token=made.eos_token)
        made.chat_template = tokenizer(family).chat_template
        for name, value in changes.items():
            setattr(made, name, value)
    return Renderer(Text(cast(Source, SimpleNamespace(name=family, tokenizer=made)), limit))


def written(family: str, content: str = "", calls: Sequence[dict[str, Any]] = ()) -> str:
    """What a model of a family writes for content and tool calls, without the end of the turn."""
    if family in ("qwen", "hermes"):
        return content + "".join(f"\n<tool_call>\n{json.dumps(c, ensure_ascii=False)}\n</tool_call>" for c in calls)
    if family == "llama":
        called = [{"name": c["name"], "parameters": c["arguments"]} for c in calls]
        return "; ".join(json.dumps(c, ensure_ascii=False) for c in called) if calls else content
    return content + (f"[TOOL_CALLS] {json.dumps(list(calls), ensure_ascii=False)}" if calls else "")


def completion(tokens: Sequence[int], finished: bool = True, version: int = 0, logprob: float = 0.0) -> Completion:
    """What an engine returns for these tokens."""
    return Completion(0, np.array(tokens, np.int64), np.full(len(tokens), logprob, np.float32), finished, version)


def sampled(family: str, text: str, finished: bool = True) -> list[int]:
    """Tokens of a turn as a model samples it, with the end of the turn if it has finished."""
    made = tokenizer(family)
    return [*made(text, add_special_tokens=False)["input_ids"], *([made.eos_token_id] if finished else [])]


def token(family: str, text: str) -> int:
    return tokenizer(family).get_vocab()[text]


def decoded(family: str, tokens: Sequence[int]) -> str:
    text = tokenizer(family).decode(list(tokens))
    assert isinstance(text, str)
    return text
