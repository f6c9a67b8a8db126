"""Converts text to tokens and back, once each: generated tokens are never encoded again."""

import inspect
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig
from transformers import PreTrainedTokenizerBase as Tokenizer

from distflow.batch.batch import Batch, Ragged
from distflow.errors import ConfigError, DataError, cut, shown
from distflow.model.encoder import NONCE, Encoder, check_whole
from distflow.model.images import Images, References
from distflow.model.source import Source
from distflow.model.time_limit import OutOfTimeError, time_limit
from distflow.plan.field_bytes import IMAGES

_TEMPLATE_S = 10.0  # for a prompt; usual ones take less than a thousandth of that
Prompt = str | list[dict[str, Any]]


class Text:
    """Encodes prompts of at most `limit` tokens, and decodes responses.

    Special tokens in a prompt's text are ordinary text, unless a chat template has `rendered` the prompts before.
    `chat_template_kwargs` are variables of the chat template.
    """

    def __init__(
        self,
        source: Source,
        limit: int,
        rendered: bool = False,
        chat_template_kwargs: Mapping[str, Any] = MappingProxyType({}),
        images: Images | None = None,
    ) -> None:
        self.name, self.limit, self.rendered = source.name, limit, rendered
        self.tokenizer: Tokenizer = source.tokenizer
        self.chat_template_kwargs, self.images = chat_template_kwargs, images
        if chat_template_kwargs:
            _check_variables(self.tokenizer, chat_template_kwargs, source.name)

    def encode(self, prompt: Prompt, images: References = ()) -> list[int]:
        """Encodes a prompt; chat messages go through the tokenizer's chat template.

        Each of its images becomes as many tokens as the model's processor makes of it.
        """
        self.check_size(prompt)
        tokens = self._encode(prompt)
        return self.check_length(self.images.expand(tokens, images) if self.images else tokens)

    def encode_rendered(self, prompt: str) -> list[int]:
        """Encodes a text that a chat template has rendered: special tokens in it are special."""
        self.check_size(prompt)
        check_whole(prompt, "the prompt")
        return self.check_length(self.tokenizer(prompt, return_attention_mask=False)["input_ids"])

    def forged_token(self, prompt: Prompt) -> str | None:
        """Returns the first special token in the text of a prompt, if it is encoded as ordinary text."""
        return self.encoder.special_in(prompt) if isinstance(prompt, str) and not self.rendered else None

    def check_length(self, tokens: list[int]) -> list[int]:
        """Returns the tokens of a prompt; raises if there are none or too many."""
        if not tokens:
            raise DataError("the prompt is empty; it needs at least one token")
        if len(tokens) > self.limit:
            raise DataError(
                f"the prompt has {len(tokens)} tokens, the longest allowed is {self.limit}"
                " (data.max_prompt, or the model's positions less rollout.max_tokens)"
            )
        return tokens

    def check_size(self, prompt: Prompt) -> None:
        """Refuses a text that is too long in any tokens: to tokenize 100 MB would take minutes and all memory."""
        if self.fewest_tokens(prompt) > self.limit:
            raise DataError(
                f"the prompt has {_count_characters(prompt):,} characters, which are more than {self.limit} tokens, the"
                " longest allowed (data.max_prompt, or the model's positions less rollout.max_tokens)"
            )

    def fewest_tokens(self, prompt: Prompt) -> int:
        """Returns a lower bound of the tokens of a prompt, without tokenizing it."""
        return _count_characters(prompt) // self._longest_token

    @cached_property
    def _longest_token(self) -> int:
        """Returns the most characters that one token can stand for."""
        return max(map(len, self.tokenizer.get_vocab()))

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if self.rendered:
                return self.encode_rendered(prompt)
            check_whole(prompt, "the prompt")
            return self.encoder.encode_prompt(prompt)
        if prompt == []:
            return []
        return self.encoder.encode(self.encoder.render(_messages(prompt)))

    @cached_property
    def encoder(self) -> Encoder:
        return Encoder(self.tokenizer, self.apply_template)

    def apply_template(self, messages: Prompt, **options: Any) -> Any:
        """Calls the tokenizer's chat template, within a time limit."""
        messages = _messages(messages)
        if not self.tokenizer.chat_template:
            raise DataError(
                f"the prompt is a list of chat messages, and the tokenizer of '{self.name}' has no chat template;"
                " give a model that has one (an instruct model), or prompts as text"
            )
        if self._reads_only_parts:
            messages = [_with_parts(m) for m in messages]
        try:
            with time_limit(_TEMPLATE_S):
                return self.tokenizer.apply_chat_template(messages, **self.chat_template_kwargs, **options)
        except OutOfTimeError:  # all rows would take as long, so none is skipped
            raise ConfigError(
                f"model: the chat template of '{self.name}' takes longer than {_TEMPLATE_S:g} s for a prompt; give"
                " a model with another one, or prompts as text"
            ) from None
        except Exception as e:  # a template is a program: it may refuse any roles and content
            raise DataError(
                f"the chat template of '{self.name}' does not accept the prompt: {e}; fix its messages"
            ) from e

    @cached_property
    def _reads_only_parts(self) -> bool:
        """Returns whether the template writes only content that is a list of parts, as SmolVLM's; others it omits."""
        if self.images is None:
            return False
        message = {"role": "user", "content": NONCE}
        try:
            return NONCE not in self.tokenizer.apply_chat_template([message], tokenize=False)
        except Exception:  # of a template, which is a program
            return True

    def encode_pairs(
        self, prompts: Sequence[Prompt], responses: Sequence[str], images: Sequence[References] | None = None
    ) -> dict[str, Ragged]:
        end, given = [self.tokenizer.eos_token_id], images or [()] * len(prompts)
        answers = [self.encoder.encode_text(_text(r), own=True) + end for r in responses]
        return {
            "prompt_tokens": ragged([self.encode(p, i) for p, i in zip(prompts, given, strict=True)]),
            "response_tokens": ragged(answers),
        }

    def encode_preferences(self, batch: Batch) -> dict[str, Any]:
        """Encodes `chosen` as the response of a prompt's first sample (+1), and `rejected` as the second's (−1)."""
        first = batch.ids == 2 * batch.groups
        answers = [_text(batch["chosen" if one else "rejected"][i]) for i, one in enumerate(first.tolist())]
        preferred = torch.from_numpy(np.where(first, 1.0, -1.0).astype(np.float32))
        return {**self.encode_pairs(batch["prompt"], answers, images_of(batch)), "preferred": preferred}

    def decode(self, tokens: Ragged) -> list[str]:
        if not len(tokens):
            return []  # the tokenizer takes no responses for an empty one
        return self.tokenizer.batch_decode([t.tolist() for t in tokens], skip_special_tokens=True)

    def stop_tokens(self, source: Source, extra: Sequence[str]) -> frozenset[int]:
        """Returns the tokens that end a response: the tokenizer's, the generation config's and the user's."""
        ends = {self.tokenizer.eos_token_id}
        if source.folder and (source.folder / "generation_config.json").exists():
            eos = GenerationConfig.from_pretrained(source.folder).eos_token_id
            ends |= set(eos if isinstance(eos, list) else [eos] if eos is not None else [])
        for text in extra:
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            if len(ids) != 1:
                raise ConfigError(
                    f"rollout.stop: '{text}' is {len(ids)} tokens; a text that is one token can end a response"
                )
            ends.add(ids[0])
        return frozenset(ends)


def images_of(batch: Batch) -> list[References] | None:
    """Returns the references to the images of each prompt; None if the data have none."""
    return batch.columns.get(IMAGES)  # type: ignore[return-value]


def _check_variables(tokenizer: Tokenizer, variables: Mapping[str, Any], model: str) -> None:
    """Refuses what a chat template would silently ignore, and what we give it ourselves."""
    where, template = "data.chat_template_kwargs", tokenizer.chat_template
    if not template:
        raise ConfigError(f"{where}: the tokenizer of '{model}' has no chat template; leave them out")
    words = set(re.findall(r"[A-Za-z_]\w*", str(template)))
    for name in variables:
        if name in inspect.signature(tokenizer.apply_chat_template).parameters or name == "messages":
            raise ConfigError(
                f"{where}.{cut(name)}: this is no variable of a template, DistFlow gives it; leave it out"
            )
        if name not in words:
            similar = get_close_matches(name, words, n=1)
            hint = f"; did you mean '{similar[0]}'?" if similar else "; leave it out"
            raise ConfigError(f"{where}.{cut(name)}: the chat template of '{model}' does not read it{hint}")


def _count_characters(prompt: Any) -> int:
    if isinstance(prompt, list):
        return sum(_count_characters(m.get("content") if isinstance(m, dict) else m) for m in prompt)
    return len(prompt) if isinstance(prompt, str) else 0


def _messages(prompt: Any) -> list[dict[str, Any]]:
    if not isinstance(prompt, list) or not all(isinstance(m, dict) and "content" in m for m in prompt):
        raise DataError(f"the prompt is {str(prompt)[:60]!r}; it is text or a list of chat messages {{role, content}}")
    return prompt


def _with_parts(message: dict[str, Any]) -> dict[str, Any]:
    content = message["content"]
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _text(response: Any) -> str:
    """Returns a response as text; given as chat messages, it is the last one."""
    if isinstance(response, list) and response and isinstance(response[-1], dict) and "content" in response[-1]:
        response = response[-1]["content"]
    if not isinstance(response, str):
        raise DataError(f"a response is {shown(response, 60)}; it is text, or chat messages that end with it")
    check_whole(response, "a response")
    return response


def ragged(rows: Sequence[Sequence[int]]) -> Ragged:
    tokens = torch.tensor([token for row in rows for token in row], dtype=torch.int64)
    return Ragged.packed(tokens, np.array([len(row) for row in rows], np.int64))


def prompt_limit(source: Source, max_tokens: int, max_prompt: int | None) -> int:
    """Returns the longest prompt, in tokens, that leaves room for a response of `max_tokens`."""
    positions = int(getattr(source.config.get_text_config(), "max_position_embeddings", None) or 1 << 30)
    room = positions - max_tokens
    if room < 1:
        raise ConfigError(
            f"rollout.max_tokens: {max_tokens} leaves no room for a prompt in the model's {positions} positions;"
            " lower it"
        )
    return min(max_prompt or room, room)
