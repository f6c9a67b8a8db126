"""A bounded number of samples of every step, as lines of each worker's own file: `samples/RANK.jsonl`.

A line has the fields that one worker has of one sample: `{"step", "id", "group", "split", "fields"}`. Other workers
have others, under the same step, split and id. Fields with a value per token (log-probs, advantages, masks, …) are as
long as the tokens, which are written as text. A conversation is a list of messages with `role` and `content`, and
maybe `tool_calls`, `tokens` (how many), `reward` (of a turn) and `cut` (by a limit on tokens).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distflow.batch.batch import Column, Ragged
from distflow.observe.bounded_log import BoundedLog
from distflow.plan.field_bytes import has_references
from distflow.run_folder import SAMPLES, rank_file
from distflow.util.arrays import Ints

LIMIT = 16 << 20  # bytes of a worker's file
MAX_TOKENS, MAX_TEXT, MAX_OBJECT = 2048, 16384, 65536  # of one field; the rest is cut off
MAX_MESSAGE = 2000  # characters of a message of a conversation that is too long
TOKENS = ("prompt_tokens", "response_tokens")

Pieces = Callable[[Sequence[int]], list[str]]  # tokens → their text
Pictures = Callable[[Sequence[str]], list[str]]  # references to images → small copies of them, as data URLs


class SampleRecorder:
    """Keeps fields of chosen samples during a step and writes them at its end.

    `pieces` shows tokens as text, `pictures` the images that a field refers to.
    """

    def __init__(
        self, folder: Path, rank: int, per_step: int, pieces: Pieces | None, pictures: Pictures | None = None
    ) -> None:
        self.log = BoundedLog(rank_file(folder, SAMPLES, rank), LIMIT, step_of)
        self.per_step, self.pieces, self.pictures = per_step, pieces, pictures
        self.listener: Callable[[int, list[dict[str, Any]]], None] | None = None  # told of what is written
        self._fields: dict[tuple[int, str, int], dict[str, Any]] = {}  # (step, split, id) → fields
        self._repeat: dict[tuple[int, str, int], int] = {}

    def add(self, step: int, split: str, chosen: Ints, ids: Ints, repeat: int, columns: Mapping[str, Column]) -> None:
        """Keeps these columns of the samples `ids`, of which only the `chosen` ones are recorded."""
        if not len(chosen) or not self.log.keeps(step):
            return
        for i in np.flatnonzero(np.isin(ids, chosen)).tolist():
            key = step, split, int(ids[i])
            fields = self._fields.setdefault(key, {})
            self._repeat[key] = repeat
            for name, column in columns.items():
                if name not in fields and _is_recorded(column):
                    fields[name] = self._value(name, column, i)

    def flush(self) -> None:
        """Writes the kept fields."""
        rows: list[dict[str, Any]] = []
        for (step, split, sample), fields in self._fields.items():
            row = {"step": step, "id": sample, "group": sample // self._repeat[step, split, sample], "split": split}
            rows.append(row | {"fields": fields})
        self._fields.clear()
        self._repeat.clear()
        # A node may return objects that only a later check of its field refuses, or that have no reader.
        lines = (json.dumps(row, ensure_ascii=False, separators=(",", ":"), default=str) + "\n" for row in rows)
        self.log.append(line.encode(errors="replace") for line in lines)
        if self.listener and rows:
            self.listener(rows[-1]["step"], rows)

    def _value(self, name: str, column: Column, i: int) -> Any:
        value = torch.as_tensor(column[i]) if isinstance(column[i], np.ndarray | np.generic) else column[i]
        if has_references(name) and self.pictures and isinstance(column, list):
            return self.pictures(column[i])
        if not isinstance(value, Tensor):
            return _cut(value)
        if name in TOKENS and self.pieces and value.ndim == 1:
            # Of a long prompt the end matters, of a long response the beginning.
            tokens = value[-MAX_TOKENS:] if name == TOKENS[0] else value[:MAX_TOKENS]
            return self.pieces(tokens.tolist())
        return _numbers(value[:MAX_TOKENS] if value.ndim else value) if value.ndim <= 1 else str(tuple(value.shape))


def choose(groups: Ints, repeat: int, per_step: int) -> Ints:
    """Returns the ids of the samples to record: all of some prompts, which are spread evenly over the step's."""
    if not len(groups) or per_step < 1:
        return groups[:0]
    prompts = max(1, per_step // repeat)
    index = np.unique(np.linspace(0, len(groups) - 1, min(prompts, len(groups))).round().astype(np.int64))
    return (groups[index, None] * repeat + np.arange(min(repeat, per_step))).reshape(-1)


def step_of(line: bytes) -> int | None:
    """Returns the step of a line, None if the line is not whole."""
    start = line[8:].partition(b",")[0]
    return int(start) if line.endswith(b"}\n") and start.lstrip(b"-").isdigit() else None


def _is_recorded(column: Column) -> bool:
    """Returns whether a column has text, objects, or at most one number per token: no images, no hidden states."""
    if isinstance(column, Ragged):
        return not column.item_shape
    return column.ndim <= 2 and column.shape[1:].numel() <= MAX_TOKENS if isinstance(column, Tensor) else True


def _numbers(value: Tensor) -> Any:
    """Returns plain numbers; those with a fraction to four digits after the point, and None where JSON has none."""
    if not value.dtype.is_floating_point:
        return value.tolist()
    numbers = value.detach().double().cpu().numpy().round(4)
    if np.isfinite(numbers).all():
        return numbers.tolist()
    return [v if np.isfinite(v) else None for v in numbers.tolist()] if numbers.ndim else None


def _cut(value: Any) -> Any:
    """Returns text and conversations of bounded length."""
    if isinstance(value, str):
        return value if len(value) <= MAX_TEXT else value[:MAX_TEXT] + " …"
    if isinstance(value, list | dict):
        text = json.dumps(value, default=str)
        if len(text) <= MAX_OBJECT:
            return value
        if isinstance(value, list) and all(isinstance(m, dict) and "role" in m for m in value):
            return _shortened(value)
        return text[:MAX_TEXT] + " …"
    return value if not isinstance(value, float) or np.isfinite(value) else None


def _shortened(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns a conversation with its long parts cut, and without messages in the middle if there are many."""
    most = MAX_OBJECT // MAX_MESSAGE // 2
    short = []
    for m in messages if len(messages) <= most else [*messages[: most // 2], *messages[-most // 2 :]]:
        texts = {k: v if isinstance(v, str) else json.dumps(v, default=str) for k, v in m.items()}
        short.append({k: v if len(texts[k]) <= MAX_MESSAGE else texts[k][:MAX_MESSAGE] + " …" for k, v in m.items()})
    if len(messages) > most:
        short.insert(most // 2, {"role": "…", "content": f"{len(messages) - most} messages are left out here"})
    return short


def text_of_tokens(tokenizer: Any) -> Pieces:
    """Returns a function that shows each token as text; what it has decoded once it remembers."""
    known: dict[int, str] = {}

    def pieces(tokens: Sequence[int]) -> list[str]:
        for token in tokens:
            if token not in known:
                known[token] = tokenizer.decode([token])
        return [known[t] for t in tokens]

    return pieces


def as_columns(value: Any, writes: Sequence[str]) -> dict[str, Column]:
    """Returns the columns among what a node has returned."""
    named = getattr(value, "columns", value if isinstance(value, Mapping) else {})
    if not named and len(writes) == 1:
        named = {writes[0]: value}
    arrays = {f: c for f, c in named.items() if isinstance(c, np.ndarray) and c.dtype.kind in "biuf"}
    columns = {f: c for f, c in named.items() if isinstance(c, Tensor | Ragged | list)}
    return columns | {f: torch.from_numpy(c) for f, c in arrays.items()}
