"""Encodes text of which only a part is trusted: no text but a chat template's begins or ends a turn.

Special tokens in the strings that a template is given are put between marks. A string that could be a part of one,
beside other text, gets a mark within that part. A special token in the rendered text without marks is the template's.
"""

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase as Tokenizer

from distflow.errors import DataError, DistflowError, shown

NONCE = secrets.token_hex(8)  # no text has it; it never reaches the tokens
_MARK = re.compile(f"({NONCE}[0-9]+[ocx])")  # a special token opens, closes; a part of one is interrupted
_INTERRUPTED = f"{NONCE}0x"
_ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython", "observation")
# Reasoning and calls, which a model writes within a turn of its own. As tokens they begin and end none.
_OWN = {"<think>", "</think>", "[THINK]", "[/THINK]", "<tool_call>", "</tool_call>", "<|python_tag|>"}
_OWN |= {"[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"}
_CALL = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {"value": NONCE}}}


class Encoder:
    """The tokens of texts and of chats. `apply_template` renders messages with the template of `tokenizer`."""

    def __init__(self, tokenizer: Tokenizer, apply_template: Callable[..., Any]) -> None:
        self.tokenizer, self.apply_template = tokenizer, apply_template

    def render(self, messages: Sequence[Any], tools: Sequence[Any] = (), generate: bool = True) -> str:
        """Returns a chat as its template writes it, with marks, for `encode`."""
        try:
            chat, schemas = [self._marked_message(m) for m in messages], self._marked(list(tools)) or None
        except RecursionError:
            raise DataError("a message is nested too deeply") from None
        return self.apply_template(chat, tools=schemas, add_generation_prompt=generate, tokenize=False)  # type: ignore[no-any-return]

    def encode(self, rendered: str, inside: bool = False) -> list[int]:
        """Encodes a rendered text; only special tokens without marks are special.

        Text that stands `inside` a longer one is encoded as such: some tokenizers put a space at the beginning.
        """
        text, forged = self._read_marks(rendered)
        trusted = [self._vocabulary[m[0]] for m in self._special.finditer(text) if m.span() not in forged]
        tokens = self._encode_around(text, [(*span, None) for span in sorted(forged)], inside)
        if [t for t in tokens if t in self.special_ids] == trusted:
            return tokens
        # The tokenizer finds others than were searched for, as it normalises the text before.
        spans = [(*m.span(), None if m.span() in forged else m[0]) for m in self._special.finditer(text)]
        return self._encode_around(text, spans, inside, only_text=True)

    def encode_text(self, text: str, inside: bool = False, own: bool = False) -> list[int]:
        """Encodes untrusted text, in which special tokens are text, too.

        The model's `own` may have the tokens that it writes within a turn: of reasoning and of calls.
        """
        return self.encode(self._marked_text(text, own), inside)

    def encode_prompt(self, text: str) -> list[int]:
        """Encodes untrusted text with what the tokenizer puts around a text."""
        tokens = self._ids(text, add_special_tokens=True)
        before, after = self._around
        if [t for t in tokens if t in self.special_ids] == [t for t in before + after if t in self.special_ids]:
            return tokens
        return before + self.encode_text(text) + after

    def special_in(self, text: str) -> str | None:
        """Returns the first special token in a text."""
        found = self._special.search(text)
        return found[0] if found else None

    def without_special(self, text: str) -> str:
        return self._special.sub("", text)

    def _marked_message(self, message: Any) -> Any:
        if not isinstance(message, Mapping):
            return self._marked(message)
        return {
            self._marked_key(key): v if key == "role" and v in _ROLES else self._marked(v) for key, v in message.items()
        }

    def _marked(self, value: Any) -> Any:
        if isinstance(value, str):
            check_whole(value, "a message")
            return self._marked_text(value)
        if isinstance(value, Mapping):
            return {self._marked_key(key): self._marked(v) for key, v in value.items()}
        return [self._marked(v) for v in value] if isinstance(value, list | tuple) else value

    def _marked_key(self, key: Any) -> Any:
        return key if not isinstance(key, str) or key.isidentifier() else self._marked(key)  # templates ask for names

    def _marked_text(self, text: str, own: bool = False) -> str:
        words = [m.span() for m in self._literal.finditer(text)]
        at = set() if text.isidentifier() and words == [(0, len(text))] else self._edges(text, 0, len(text))
        starts, ends = [0, *(end for _, end in words)], [*(start for start, _ in words), len(text)]
        for start, end in zip(starts, ends, strict=True) if words else ():  # a template may take them out
            at |= self._edges(text, start, end)
        spans = [m for m in self._special.finditer(text) if not (own and m[0] in _OWN)]
        if not at and not spans:
            return text
        marks = [(place, _INTERRUPTED) for place in at]
        for m in spans:
            number = self._number[m[0]]
            marks += [(m.start(), f"{NONCE}{number}o"), (m.end(), f"{NONCE}{number}c")]
        result, last = "", 0
        for place, mark in sorted(marks, key=lambda m: m[0]):
            result, last = result + text[last:place] + mark, place
        return result + text[last:]

    def _edges(self, text: str, start: int, end: int) -> set[int]:
        """Returns where to interrupt what may become a special token together with the text before or behind."""
        if not (core := text[start:end].strip()):
            return set()
        first, n = text.index(core, start), len(core)
        most = min(n, self._longest)
        at = {first + n - k + 1 for k in range(1, most + 1) if core[n - k :] in self._prefixes}
        at |= {first + k - 1 for k in range(1, most + 1) if core[:k] in self._suffixes}
        return at | ({first} if n < self._longest and any(core in s[1:-1] for s in self._special_tokens) else set())

    def _read_marks(self, rendered: str) -> tuple[str, set[tuple[int, int]]]:
        """Returns the text without marks, and the spans of the special tokens in it that are not the template's."""
        if NONCE not in rendered:
            return rendered, set()
        text, at, marks, interrupted = [], 0, set[tuple[int, str]](), set[int]()
        for piece in _MARK.split(rendered):
            if _MARK.fullmatch(piece):
                interrupted.add(at)
                marks.add((at, piece))
            else:
                text.append(piece)
                at += len(piece)
        whole, forged = "".join(text), set[tuple[int, int]]()
        for m in self._special.finditer(whole):
            mark = f"{NONCE}{self._number[m[0]]}"
            around = (m.start(), mark + "o") in marks and (m.end(), mark + "c") in marks
            if around or any(place in interrupted for place in range(m.start() + 1, m.end())):
                forged.add(m.span())
        return whole, forged

    def _encode_around(
        self, text: str, spans: Sequence[tuple[int, int, str | None]], inside: bool, only_text: bool = False
    ) -> list[int]:
        """Encodes text with spans of special tokens in it: the ones with a name as such, the others as text.

        Text between them is `only_text`, or encoded with its special tokens.
        """
        tokens: list[int] = []
        last = 0
        for start, end, name in (*spans, (len(text), len(text), "")):
            if piece := text[last:start]:
                within = inside or last > 0
                tokens += self._as_text(piece, within) if only_text else self._piece(piece, within)
            last = end
            if name:
                tokens.append(self._vocabulary[name])
            elif name is None:
                tokens += self._as_text(text[start:end], True)
        return tokens

    def _as_text(self, text: str, inside: bool) -> list[int]:
        tokens = self._piece(text, inside, split_special_tokens=True)
        if len(text) < 2 or self.special_ids.isdisjoint(tokens):
            return tokens
        found = self._special.search(text)  # a tokenizer that knows no such option, or that adds tokens of its own
        cut = found.start() + 1 if found else len(text) // 2
        return self._as_text(text[:cut], inside) + self._as_text(text[cut:], True)

    def _piece(self, text: str, inside: bool, **options: Any) -> list[int]:
        if not (inside and self._adds_space):
            return self._ids(text, **options)
        newline, tokens = self._ids("\n"), self._ids(f"\n{text}", **options)
        return tokens[len(newline) :] if tokens[: len(newline)] == newline else self._ids(text, **options)

    def _ids(self, text: str, add_special_tokens: bool = False, **options: Any) -> list[int]:
        options = {"add_special_tokens": add_special_tokens, "return_attention_mask": False, **options}
        return self.tokenizer(text, **options)["input_ids"]  # type: ignore[no-any-return]

    @cached_property
    def special_ids(self) -> frozenset[int]:
        return frozenset(self._vocabulary[token] for token in self._special_tokens)

    @cached_property
    def _special_tokens(self) -> list[str]:
        """Returns the tokens that only the template writes: special ones, and added ones around turns and results."""
        added = self.tokenizer.added_tokens_decoder.values()
        frame = self._frame()
        names = {t.content for t in added if t.special or (not t.content.isspace() and t.content in frame)}
        names |= set(self.tokenizer.all_special_tokens)
        names &= self._vocabulary.keys() - ({self.tokenizer.unk_token} - {self.tokenizer.eos_token})  # any text has it
        return sorted((n for n in names if n), key=lambda n: (-len(n), n))  # a token may be the beginning of another

    def _frame(self) -> str:
        """Returns what the template writes around empty messages."""
        user, answer, result = ({"role": role, "content": ""} for role in ("user", "assistant", "tool"))
        calling = [user, {**answer, "tool_calls": [_CALL]}]
        _, _, called = self._empty([*calling, {**result, "name": "f", "tool_call_id": _CALL["id"]}]).rpartition(NONCE)
        _, _, closed = self._empty(calling).rpartition(NONCE)  # has tokens that the model writes
        return self._empty([user, answer, user]) + called.removeprefix(closed)

    def _empty(self, messages: Sequence[Any]) -> str:
        if not self.tokenizer.chat_template:
            return ""
        try:
            return str(self.apply_template(messages, tokenize=False))
        except DistflowError:  # such as a template without tools
            return ""

    @cached_property
    def _special(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self._special_tokens)) or "(?!)")

    @cached_property
    def _number(self) -> Mapping[str, int]:
        return {token: i for i, token in enumerate(self._special_tokens)}

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._special_tokens), default=0)

    @cached_property
    def _prefixes(self) -> frozenset[str]:
        return frozenset(t[:k] for t in self._special_tokens for k in range(1, len(t)))

    @cached_property
    def _suffixes(self) -> frozenset[str]:
        return frozenset(t[k:] for t in self._special_tokens for k in range(1, len(t)))

    @cached_property
    def _vocabulary(self) -> Mapping[str, int]:
        return self.tokenizer.get_vocab()

    @cached_property
    def _literal(self) -> re.Pattern[str]:
        """Matches the strings for which the template may look in a text."""
        templates: Any = self.tokenizer.chat_template or ""
        source = "\n".join(templates.values()) if isinstance(templates, dict) else templates
        quoted = [a or b for a, b in re.findall(r"'([^'\n]*)'|\"([^\"\n]*)\"", source)]
        words = {word for text in quoted for word in re.split(r"(?:\\[nrt]|\s)+", text) if len(word) > 2}
        return re.compile("|".join(map(re.escape, sorted(words, key=lambda w: (-len(w), w)))) or "(?!)")

    @cached_property
    def _around(self) -> tuple[list[int], list[int]]:
        """Returns what the tokenizer puts before and behind a text, such as a token for its beginning."""
        whole, text = self._ids("a", add_special_tokens=True), self._ids("a")
        at = next((i for i in range(len(whole)) if whole[i : i + len(text)] == text), 0)
        return whole[:at], whole[at + len(text) :]

    @cached_property
    def _adds_space(self) -> bool:
        """Returns whether a text begins with another token than it would inside of a longer one (SentencePiece)."""
        newline, alone, inside = (self._ids(text) for text in ("\n", "a", "\na"))
        return inside[: len(newline)] == newline and inside[len(newline) :] != alone


def check_whole(text: str, what: str) -> None:
    """Refuses lone surrogates, which JSON can express and no tokenizer accepts."""
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise DataError(f"{what} has a lone surrogate, {text[e.start]!r}, at {e.start}: {shown(text, 60)}") from None
