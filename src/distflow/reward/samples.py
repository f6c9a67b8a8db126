"""What reward functions are called with, made of the columns of a batch."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from distflow.data.batch import Batch, Column, Ragged
from distflow.errors import suggest
from distflow.reward.errors import RewardError
from distflow.reward.signature import Signature

# Where a ground truth is looked for. `reward_model` holds a dict, as verl writes it.
ANSWERS = ("reward_model", "ground_truth", "answer", "solution", "label")

_OURS = ("prompt", "response", "response_tokens")  # handed to TRL's functions under TRL's names


class Samples:
    """Samples by column, as plain Python values. `ids` name them in errors."""

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
            raise RewardError(f"the reward reads '{name}', which the samples lack{suggest(name, self._columns)}")
        if name not in self._plain:
            self._plain[name] = _plain(self._columns[name])
        return self._plain[name]

    def verl(self, signature: Signature, where: str, answer: str | None = None) -> Iterator[dict[str, Any]]:
        """The arguments of each sample. The ground truth is in column `answer`, or in the first of ANSWERS there is."""
        columns = {"solution_str": self["response"]}
        if signature.wants("data_source"):
            columns["data_source"] = self.sources or [""] * len(self)
        if signature.wants("extra_info"):
            found = self["extra_info"] if "extra_info" in self else [None] * len(self)
            columns["extra_info"] = [v or {} for v in found]
        name = answer or next((a for a in ANSWERS if a in self), None)
        if name and signature.wants("ground_truth"):
            columns["ground_truth"] = self._truths(name, where)
        elif "ground_truth" in signature.needs:
            raise RewardError(
                f"{where}: needs a ground truth, and the samples have none of {', '.join(ANSWERS)};"
                f" name its column with `reward.answer`{suggest('answer', self._columns)}"
            )
        return (dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True))

    def trl(self, signature: Signature, where: str) -> dict[str, Any]:
        """The arguments of one call for all samples."""
        columns = {n: c for n, c in self._columns.items() if n not in _OURS}
        # `**kwargs` means the columns of the data, which never hold a tensor per sample.
        open_to = {n for n, c in columns.items() if signature.open and not isinstance(c, Ragged)}
        arguments: dict[str, Any] = {n: self[n] for n in columns if n in open_to or n in signature.takes}
        for name in signature.columns:
            if name not in arguments:
                raise RewardError(f"{where}: needs column '{name}', which the samples lack{suggest(name, columns)}")
        if signature.wants("prompts"):
            arguments["prompts"] = self["prompt"]
        chat = [isinstance(p, list) for p in self["prompt"]]
        arguments["completions"] = [
            [{"role": "assistant", "content": text}] if c else text
            for c, text in zip(chat, self["response"], strict=True)
        ]
        if signature.wants("completion_ids") and "response_tokens" in self:
            arguments["completion_ids"] = self["response_tokens"]
        elif "completion_ids" in signature.needs:
            raise RewardError(f"{where}: needs completion_ids, but the samples lack 'response_tokens'; read those too")
        return arguments

    @property
    def sources(self) -> list[str] | None:
        """Where each sample comes from, if the data says it."""
        return [str(v or "") for v in self["data_source"]] if "data_source" in self else None

    def _truths(self, name: str, where: str) -> list[Any]:
        values = self[name]
        if name != "reward_model":
            return values
        for i, value in zip(self.ids, values, strict=True):
            if not isinstance(value, dict) or "ground_truth" not in value:
                raise RewardError(
                    f"{where}: sample {i}: its 'reward_model' holds no 'ground_truth';"
                    " mend the row, or name another column with `reward.answer`"
                )
        return [value["ground_truth"] for value in values]


def _plain(column: Column) -> list[Any]:
    if isinstance(column, Ragged):
        return [row.tolist() for row in column]
    return column.tolist() if isinstance(column, Tensor) else column
