"""Renders conversations to tokens by the model's own chat template, without ever rendering again what was sampled.

What follows a sampled turn is found by difference: the template renders the conversation with a mark in place of the
turn, and the text behind the mark is what it puts there: the end of the turn, the new messages, the next generation
prompt. So every template works that writes messages in their order, also changed ones, and ones that strip the
reasoning of earlier turns.
"""

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from distflow.agents.image_parts import references_of, without_references
from distflow.agents.reasoning import THINK
from distflow.agents.tool_calls import ToolCall, ToolParser, Tools, parser_for, split_reasoning
from distflow.errors import ConfigError, DataError, DistflowError, shown
from distflow.model.encoder import NONCE, Encoder, check_whole
from distflow.model.images import Place
from distflow.model.text import Text

Message = dict[str, Any]
_ENDS = 64  # sets of tools that are remembered: every sample may have its own
_TURN = f"{NONCE}turn"


class Renderer:
    """Text and tokens of conversations with one model."""

    def __init__(self, text: Text, tool_parser: str = "auto") -> None:
        self.text, self.tokenizer = text, text.tokenizer
        self.parse: ToolParser = parser_for(self.tokenizer, tool_parser)
        self._ends: dict[str, str] = {}  # tools as JSON → what is behind a turn that nothing follows

    def prompt(self, messages: Sequence[Message], tools: Tools = (), generation_prompt: bool = True) -> list[int]:
        """Encodes messages and the generation prompt."""
        self.text.check_size(list(messages))
        rendered = self.encoder.render([without_references(m) for m in messages], tools, generation_prompt)
        return self.text.check_length(self._with_images(self.encoder.encode(rendered), messages))

    def continuation(
        self,
        turn: Message,
        new: Sequence[Message],
        tools: Tools,
        last_tokens: Sequence[int],
        finished: bool = True,
    ) -> list[int]:
        """Returns the tokens of new messages and the generation prompt, to append to a turn that was sampled.

        The end of the turn is added only if `last_tokens`, its last ones, do not have it, because the turn was cut
        (then it is not `finished` by a stop token).
        """
        rendered = self._tail(turn, [without_references(m) for m in new], tools)
        tail = self._with_images(self.encoder.encode(rendered, inside=True), new)
        if not last_tokens or not tail:
            return tail
        for n in range(min(len(last_tokens), len(tail)), 0, -1):
            if list(last_tokens[-n:]) == tail[:n]:
                return tail[n:]
        if finished and last_tokens[-1] in self.encoder.special_ids and tail[0] in self.encoder.special_ids:
            return tail[1:]  # it ended with another token than the template's, such as <|eom_id|> for <|eot_id|>
        return tail

    def check(self, tools: Tools = ()) -> list[str]:
        """Tries the template with a short conversation: an error if it cannot be continued; returns warnings."""
        if not self.tokenizer.chat_template:
            raise ConfigError(
                f"model: the tokenizer of '{self.text.name}' has no chat template, which conversations need; give a"
                " model that has one (an instruct model), or set `chat_template` in its tokenizer_config.json"
            )
        turn: Message = {"role": "assistant", "content": "answer"}
        reply: Message = {"role": "user", "content": NONCE}
        if tools:
            name = _name(tools[0])
            turn["tool_calls"] = [ToolCall(name, {}, "call00000").message()]
            reply = {"role": "tool", "content": NONCE, "name": name, "tool_call_id": "call00000"}
        try:
            prompt = self.encoder.render([{"role": "user", "content": "question"}], tools, True)
            tail = self._tail(turn, [reply], tools)
        except DistflowError as e:
            raise ConfigError(
                f"model: the chat template of '{self.text.name}' cannot continue a conversation with a message of role"
                f" '{reply['role']}' after the assistant's ({e}); give a model with a template that can"
                f"{', or an environment without tools' if tools else ''}"
            ) from None
        if NONCE not in tail:
            raise ConfigError(
                f"model: the chat template of '{self.text.name}' cannot continue a conversation: a message after the"
                " assistant's does not come after it in the text; give a model with a template that writes messages in"
                " their order"
            )
        if tools and name not in prompt:
            return [
                f"the chat template of '{self.text.name}' does not show tools to the model; describe them in the prompt"
            ]
        return []

    def places(self, tokens: Sequence[int], references: Sequence[str], before: int = 0) -> list[Place]:
        """Returns where the images of these tokens are; `before`: how many tokens there are before them."""
        images = self.text.images
        if images is None:
            return []
        return [Place(p.start + before, p.end + before, p.reference) for p in images.places(tokens, references)]

    def as_read(self, tokens: Sequence[int], sampled: Sequence[bool]) -> Sequence[int]:
        """Returns tokens as the model reads them: none of the sampled ones stands for an image."""
        images = self.text.images
        if images is None or images.token not in tokens:
            return tokens
        return [images.end if s and t == images.token else t for t, s in zip(tokens, sampled, strict=True)]

    def check_no_images(self, tokens: Sequence[int]) -> None:
        """Refuses tokens that stand for images where tokens are given instead of messages."""
        if self.text.images and self.text.images.token in tokens:
            raise DataError("tokens of images cannot be continued; give the conversation as messages")

    def _with_images(self, tokens: list[int], messages: Sequence[Message]) -> list[int]:
        references, images = references_of(messages), self.text.images
        if references and images is None:
            raise DataError(f"a message has an image, and '{self.text.name}' reads none")
        return images.expand(tokens, references) if images else tokens

    def decode(self, tokens: Sequence[int], keep_special: bool = False) -> str:
        """Returns the text of sampled tokens, of all at once: a character may be split over several."""
        text = self.tokenizer.decode(
            self.check_tokens(tokens), skip_special_tokens=not keep_special, clean_up_tokenization_spaces=False
        )
        return text if isinstance(text, str) else text[0]

    def check_tokens(self, tokens: Sequence[int]) -> list[int]:
        """Returns the tokens of a request; raises if the model does not have them all."""
        for token in tokens:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < self._vocabulary:
                raise DataError(f"{shown(token, 40)} is no token of '{self.text.name}', which has {self._vocabulary}")
        return list(tokens)

    def encode_text(self, text: str) -> list[int]:
        """Encodes text of an environment, in which special tokens are text too."""
        check_whole(text, "a text of the environment")
        return self.encoder.encode_text(text, inside=True)

    def read(self, tokens: Sequence[int], tools: Tools) -> tuple[str, str, list[ToolCall], list[str]]:
        """Returns the text, the content, tool calls and errors of a sampled turn; without tools, there are no calls."""
        if tokens and tokens[-1] in self.encoder.special_ids:
            tokens = tokens[:-1]
        if not tools:
            text = self.decode(tokens)
            return text, text, [], []
        text = self.decode(tokens, keep_special=True)
        thought, rest = split_reasoning(text, self._opens_reasoning)
        content, calls, errors = self.parse(rest, tools)
        return text, self.encoder.without_special(thought + content), calls, errors

    def _tail(self, turn: Message, new: Sequence[Message], tools: Tools) -> str:
        """Returns the text behind a turn of the assistant once `new` messages follow it.

        What came before the turn does not matter, so a question stands for it: histories that a template would refuse,
        such as an answer to a malformed call, are none.
        """
        before: list[Message] = [{"role": "user", "content": "question"}]
        plain: list[Message] = [*before, {"role": "assistant", "content": _TURN}]
        if any(m["role"] == "tool" for m in new):
            calls, new = _answered(turn, new)
            calling: list[Message] = [*before, {"role": "assistant", "content": "", "tool_calls": calls}]
            try:
                end, closed = self._end(plain, tools), self._behind(calling, tools, False)
                whole = self._behind([*calling, *new], tools, True)
                if closed.endswith(end) and whole.startswith(closed):
                    return end + whole[len(closed) :]
            except DataError:
                pass  # a template that refuses these calls may still write their results
        return self._behind([*plain, *new], tools, True)

    def _end(self, plain: Sequence[Message], tools: Tools) -> str:
        """Returns what is behind a turn that nothing follows, rendered once: it is the same after every turn."""
        key = json.dumps(tools, default=repr)
        if key not in self._ends:
            if len(self._ends) >= _ENDS:
                self._ends.clear()
            self._ends[key] = self._behind(plain, tools, False)
        return self._ends[key]

    def _behind(self, messages: Sequence[Message], tools: Tools, generate: bool) -> str:
        before, found, behind = self.encoder.render(messages, tools, generate).rpartition(_TURN)
        if not found or _TURN in before:
            raise DataError(
                f"the chat template of '{self.text.name}' cannot continue the conversation: it writes an earlier turn"
                f" of the assistant {'more than once' if found else 'nowhere'}; give a model with another template"
            )
        return behind

    @property
    def encoder(self) -> Encoder:
        return self.text.encoder

    @cached_property
    def _vocabulary(self) -> int:
        return len(self.tokenizer)

    @cached_property
    def _opens_reasoning(self) -> bool:
        return self.encoder.render([{"role": "user", "content": "question"}], (), True).rstrip().endswith(THINK)


def _name(tool: dict[str, Any]) -> str:
    return str(tool.get("function", tool).get("name", "tool"))


def _answered(turn: Message, new: Sequence[Message]) -> tuple[list[dict[str, Any]], list[Message]]:
    """Returns the tool calls of a turn, the mark in the last one, and new messages in which each result has an id.

    Where none of its calls could be read, calls are made up, because templates demand them before results.
    """
    calls = [ToolCall(c["function"]["name"], {}, c.get("id", "")).message() for c in turn.get("tool_calls") or []]
    results = [m for m in new if m["role"] == "tool"]
    if not calls:
        ids = [m.get("tool_call_id") or f"call{i:05d}" for i, m in enumerate(results)]
        calls = [ToolCall(m.get("name") or "tool", {}, id).message() for m, id in zip(results, ids, strict=True)]
    known = iter(calls)
    made = [
        {**m, "tool_call_id": m.get("tool_call_id") or next(known, calls[-1])["id"]} if m["role"] == "tool" else m
        for m in new
    ]
    calls[-1]["function"]["arguments"] = {"value": _TURN}
    return calls, made
