"""A model that calls a tool in every turn, made on the spot: a Qwen2 of the usual shape that computes in full, whose
next token depends on the last one only.

Attention and MLPs are added to nothing: their last projections are zero. So the head reads the last token's embedding,
and a table of successors is the model: a few words, then a tool call, then the end of the turn.
"""

from itertools import pairwise
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging

import assets
from distflow.model.tokenizer import train_tokenizer

WORDS = 8  # before a call, on average: their number is geometric
_CALL = ["<tool_call>", '\n{"name": "look", "arguments": {"at": ', "3", "}}\n", "</tool_call>", "<|im_end|>"]
_WORD, _SURE = " hm", 40.0
_TEMPLATE = """{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool.function.name }} {% endfor %}<|im_end|>
{% endif %}{%- for m in messages -%}
<|im_start|>{{ m.role }}
{% if m.content %}{{ m.content }}{% endif %}{%- for call in m.tool_calls or [] -%}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{%- endfor -%}<|im_end|>
{% endfor %}{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""


def make_talker(folder: Path) -> None:
    tokenizer = _tokenizer()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    logging.disable_progress_bar()
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    shape = assets.SHAPE | {"tie_word_embeddings": False}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=len(tokenizer), **ends, **shape))  # type: ignore[arg-type]
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in [_WORD, *_CALL]}
    newline = tokenizer("\n", add_special_tokens=False)["input_ids"][-1]  # the generation prompt ends with it
    words = {_WORD: 1 - 1 / WORDS, _CALL[0]: 1 / WORDS}
    successors = {newline: {_WORD: 1.0}, ids[_WORD]: words}
    successors |= {ids[a]: {b: 1.0} for a, b in pairwise(_CALL)}
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
        head.zero_()
        for dimension, (token, following) in enumerate(successors.items()):
            embedding[token] = 0.0
            embedding[token, dimension] = 1.0
            scale = embedding.shape[1] ** -0.5  # the norm before the head makes a one a root of the width
            for successor, probability in following.items():
                head[ids[successor], dimension] = scale * (_SURE + torch.tensor(probability).log())
    model.save_pretrained(folder)


def _tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = train_tokenizer(iter(["system user assistant tool empty look " * 8]), 300)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.add_tokens([_WORD, *_CALL[:2], "}}\n", "</tool_call>"])
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.chat_template = _TEMPLATE
    return tokenizer
