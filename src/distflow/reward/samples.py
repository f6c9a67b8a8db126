"""Builds the arguments of reward functions from the columns of a batch."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from distflow.batch.batch import Batch, Column, Ragged
from distflow.errors import suggest
from distflow.reward.errors import RewardError
from distflow.reward.signature import Signature

# Columns searched for the ground truth, in this order. `reward_model` holds a dict, as verl writes it.
GROUND_TRUTH_COLUMNS = ("reward_model", "ground_truth", "answer", "solution", "label")

EXCERPT = 600  # characters of a prompt, and of a response, in an error
_RENAMED = ("prompt", "response", "response_tokens")  # passed to TRL's functions under TRL's names


class Samples:
    """The columns of a batch as plain Python values; `ids` name the samples in errors."""

    def __init__(self, ids: Sequence[Any], columns: Mapping[str, Column]) -> None:
        self.ids, self._columns = ids, columns
        self._plain: dict[str, list[Any]] = {}

    @classmethod
    def of(cls, batch: Batch) -> "Samples":
        return cls(batch.ids.tolist(), batch.columns)

    def __len__(self) -> int:
        return len(self.ids)

    def __contains__(self, name: str) -> bool:
        return name in self._columns

    def __getitem__(self, name: str) -> list[Any]:
        if name not in self._columns:
            raise RewardError(
                f"the reward reads '{name}', but the samples have no such field{suggest(name, self._columns)}"
            )
        if name not in self._plain:
            self._plain[name] = _plain(self._columns[name])
        return self._plain[name]

    def excerpt(self, i: int) -> str:
        """Returns a sample for an error message: its prompt and response, each cut in the middle."""
        fields = [f for f in ("prompt", "response") if f in self]
        return "\n".join(f"  {f}: {_cut_middle(json.dumps(self[f][i], ensure_ascii=False))}" for f in fields)

    def verl_arguments(self, signature: Signature, where: str, answer: str | None = None) -> Iterator[dict[str, Any]]:
        """Yields the arguments for each sample. The ground truth is column `answer`, or the first of
        GROUND_TRUTH_COLUMNS that exists.
        """
        columns = {"solution_str": self["response"]}
        if signature.accepts("data_source"):
            columns["data_source"] = self.sources or [""] * len(self)
        if signature.accepts("extra_info"):
            info = self["extra_info"] if "extra_info" in self else [None] * len(self)
            columns["extra_info"] = [v or {} for v in info]
        name = answer or next((c for c in GROUND_TRUTH_COLUMNS if c in self), None)
        if name and signature.accepts("ground_truth"):
            columns["ground_truth"] = self._ground_truths(name, where)
        elif "ground_truth" in signature.required:
            raise RewardError(
                f"{where}: needs a ground truth, but the data has none of {', '.join(GROUND_TRUTH_COLUMNS)};"
                f" set `reward.answer` to its column{suggest('answer', self._columns)}"
            )
        return (dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True))

    def trl_arguments(self, signature: Signature, where: str, state: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the arguments of one call for all samples; `state` are the attributes of `trainer_state`."""
        columns = {n: c for n, c in self._columns.items() if n not in _RENAMED}
        # `**kwargs` takes the columns of the data set, which are never ragged; ragged fields are passed by name only.
        by_kwargs = {n for n, c in columns.items() if signature.var_keyword and not isinstance(c, Ragged)}
        arguments: dict[str, Any] = {n: self[n] for n in columns if n in by_kwargs or n in signature.parameters}
        for name in signature.required_columns:
            if name not in arguments:
                raise RewardError(f"{where}: needs column '{name}', which the data lacks{suggest(name, columns)}")
        if signature.accepts("prompts"):
            arguments["prompts"] = self["prompt"]
        if signature.accepts("trainer_state"):
            arguments["trainer_state"] = dict(state)
        chat = [isinstance(p, list) for p in self["prompt"]]
        arguments["completions"] = [
            [{"role": "assistant", "content": text}] if c else text
            for c, text in zip(chat, self["response"], strict=True)
        ]
        if signature.accepts("completion_ids") and "response_tokens" in self:
            arguments["completion_ids"] = self["response_tokens"]
        elif "completion_ids" in signature.required:
            raise RewardError(
                f"{where}: needs completion_ids, but the batch lacks 'response_tokens'; read it in the reward node"
            )
        return arguments

    @property
    def sources(self) -> list[str] | None:
        """Returns the `data_source` of each sample, if the data has that column."""
        return [str(v or "") for v in self["data_source"]] if "data_source" in self else None

    def _ground_truths(self, name: str, where: str) -> list[Any]:
        values = self[name]
        if name != "reward_model":
            return values
        for i, value in zip(self.ids, values, strict=True):
            if not isinstance(value, dict) or "ground_truth" not in value:
                raise RewardError(
                    f"{where}: sample {i}: its 'reward_model' holds no 'ground_truth';"
                    " fix the row, or set `reward.answer` to another column"
                )
        return [value["ground_truth"] for value in values]


def _cut_middle(text: str) -> str:
    if len(text) <= EXCERPT:
        return text
    return f"{text[: EXCERPT // 2]} … {len(text) - EXCERPT:,} characters … {text[-EXCERPT // 2 :]}"


def _plain(column: Column) -> list[Any]:
    if isinstance(column, Ragged):
        return [row.tolist() for row in column]
    return column.tolist() if isinstance(column, Tensor) else column
