"""Trains a small byte-level BPE tokenizer for a model with random weights."""

from collections.abc import Iterator

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

_SPECIAL = ["<pad>", "<eos>"]
SMALLEST = 256 + len(_SPECIAL)  # every byte, so that any text can be encoded
_CHAT = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def train_tokenizer(texts: Iterator[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """Trains at most `vocabulary` tokens; with `SMALLEST` or fewer, one per byte. Deterministic in the texts."""
    tokenizer = Tokenizer(models.BPE())
    # Digits are split: numbers of different length are then tokenised alike.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=max(vocabulary, SMALLEST),
        special_tokens=_SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=_SPECIAL[0], eos_token=_SPECIAL[1])
    fast.chat_template = _CHAT
    return fast
