"""A tiny Qwen2 and something to ask it, made on the spot, for the benchmarks of rollouts and of whole steps."""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging

from distflow.model.tokenizer import train_tokenizer

PAD, EOS = "<pad>", "<eos>"
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}


def make_model(folder: Path, vocab: int, pad: int = 0, eos: int = 1) -> None:
    """About 4M parameters, at random: every token is about as likely as any other."""
    torch.manual_seed(0)
    logging.disable_progress_bar()
    config = Qwen2Config(vocab_size=vocab, bos_token_id=None, eos_token_id=eos, pad_token_id=pad, **SHAPE)  # type: ignore[arg-type]
    Qwen2ForCausalLM(config).save_pretrained(folder)


def make_assets(folder: Path, chars: bool) -> None:
    """Model, tokenizer and `prompts.jsonl`. `chars`: one token per character and few of them, so that the model, at
    random as it is, often ends a response; otherwise 1024 tokens."""
    rows = list(sums(2048))
    texts = [row["prompt"] + row["answer"] for row in rows]
    tokenizer = _one_per_character(texts) if chars else train_tokenizer(iter(texts), 1024)
    tokenizer.save_pretrained(folder)
    vocab = len(tokenizer) if chars else 1024
    make_model(folder, vocab, tokenizer.pad_token_id, tokenizer.eos_token_id)
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def sums(n: int) -> Iterator[dict[str, str]]:
    rng = random.Random(0)
    for _ in range(n):
        a, b = rng.randrange(100), rng.randrange(100)
        yield {"prompt": f"What is {a} + {b}? Answer: ", "answer": str(a + b)}


@dataclass(frozen=True)
class Matrices:
    """What a token is multiplied with, as (in, out); `head` only where a token is predicted."""

    layer: list[tuple[int, int]]
    head: tuple[int, int]
    layers: int
    hidden: int
    kv: int  # width of the keys of a token in one layer

    @property
    def body(self) -> list[tuple[int, int]]:
        return self.layer * self.layers


def matrices(folder: Path) -> Matrices:
    """Of the Qwen2 in this folder."""
    config = json.loads((folder / "config.json").read_text())
    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    kv = hidden * config["num_key_value_heads"] // config["num_attention_heads"]
    attention = [(hidden, hidden), (hidden, kv), (hidden, kv), (hidden, hidden)]
    layer = [*attention, (hidden, ffn), (hidden, ffn), (ffn, hidden)]
    return Matrices(layer, (hidden, config["vocab_size"]), config["num_hidden_layers"], hidden, kv)


def _one_per_character(texts: list[str]) -> PreTrainedTokenizerFast:
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False)
    seen = sorted({c for text in texts for word, _ in spell.pre_tokenize_str(text) for c in word})
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate([PAD, EOS, *seen])}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = spell, decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS)
