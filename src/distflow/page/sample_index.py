"""The samples of a run: a short row for each, and all that workers recorded of one, put together again."""

import threading
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distflow.run_folder import SAMPLES
from distflow.util.lines import Tail, log_files, parse

PREVIEW = 160  # characters
MAX_ROWS = 20_000  # that a page is given: the newest
Key = tuple[int, str, int]  # step, split, id


@dataclass
class _SampleRow:
    """A row of the table of samples, and where the lines of the sample are."""

    group: int
    lines: list[tuple[Path, int]] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)


class SampleIndex:
    """Reads what is new since it was last asked. Any thread may ask."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / SAMPLES
        self.bad = 0  # lines that could not be read
        self._lock = threading.Lock()
        self._tails: dict[Path, Tail] = {}
        self._rows: dict[Key, _SampleRow] = {}

    def _update(self) -> dict[Key, _SampleRow]:
        """Reads on; returns the rows of all samples so far."""
        with self._lock:
            paths = log_files(self.folder)
            tails = [self._tails.setdefault(path, Tail(path)) for path in paths]
            if any(tail.replaced() for tail in tails):  # thinned out, or of a run continued from an earlier step
                self._tails = {path: Tail(path) for path in paths}
                self._rows, self.bad = {}, 0
                tails = list(self._tails.values())
            for tail in tails:
                for offset, line in tail.lines():
                    self._add(tail.path, offset, parse(line))
            return dict(self._rows)

    def _add(self, path: Path, offset: int, row: Any) -> None:
        try:
            key = int(row["step"]), str(row["split"]), int(row["id"])
            fields, group = dict(row["fields"]), int(row["group"])
        except (TypeError, KeyError, ValueError):
            self.bad += 1
            return
        entry = self._rows.setdefault(key, _SampleRow(group))
        entry.lines.append((path, offset))
        entry.values |= summary(fields)

    def table(self) -> dict[str, Any]:
        """Returns a row per sample, those of the newest steps, as columns."""
        rows = self._update()
        keys = sorted(rows)[-MAX_ROWS:]
        zero = _without_signal(rows)
        names = ("source", "score", "length", "advantage", "finished", "kept", "prompt", "response")
        return {
            "count": len(rows),
            "bad": self.bad,
            "step": [k[0] for k in keys],
            "split": [k[1] for k in keys],
            "id": [k[2] for k in keys],
            "group": [rows[k].group for k in keys],
            "zero": [zero[k[0], k[1], rows[k].group] for k in keys],
            **{name: [rows[k].values.get(name) for k in keys] for name in names},
        }

    def sample(self, step: int, split: str, sample: int) -> dict[str, Any] | None:
        """Returns all that was recorded of one sample."""
        row = self._update().get((step, split, sample))
        if row is None:
            return None
        fields: dict[str, Any] = {}
        for path, offset in row.lines:
            with open(path, "rb") as file:
                file.seek(offset)
                fields |= (parse(file.readline()) or {}).get("fields", {})
        return {"step": step, "split": split, "id": sample, "group": row.group, "fields": fields}

    def recorded(self) -> list[Key]:
        """Returns step, split and id of every sample."""
        return sorted(self._update())


def _without_signal(rows: Mapping[Key, _SampleRow]) -> dict[tuple[int, str, int], bool]:
    """Returns for every group whether its responses all have the same score, so that it teaches nothing."""
    scores: dict[tuple[int, str, int], list[Any]] = defaultdict(list)
    for (step, split, _), row in rows.items():
        scores[step, split, row.group].append(row.values.get("score"))
    return {g: len(s) > 1 and None not in s and len(set(s)) == 1 for g, s in scores.items()}


def summary(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns the summary of these fields for the table."""
    values: dict[str, Any] = {}
    if "prompt" in fields:
        values["prompt"] = last_message(fields["prompt"])
    if "messages" in fields:
        values["response"] = last_message(fields["messages"])
    if "response" in fields:
        values["response"] = str(fields["response"])[:PREVIEW]
    if isinstance(fields.get("conversation"), list):
        values["response"] = turns(fields["conversation"])
    if isinstance(fields.get("response_tokens"), list):
        values["length"] = len(fields["response_tokens"])
    if isinstance(fields.get("score"), int | float):
        values["score"] = fields["score"]
    advantage = fields.get("advantage")
    if isinstance(advantage, list):
        numbers = [a for a in advantage if isinstance(a, int | float)]
        advantage = round(sum(numbers) / len(numbers), 4) if numbers else None
    if isinstance(advantage, int | float):
        values["advantage"] = advantage
    named = (("data_source", "source"), ("environment_name", "source"))
    for field_name, name in (*named, ("finished", "finished"), ("keep", "kept")):
        if field_name in fields:
            values[name] = fields[field_name]
    return values


def last_message(prompt: Any) -> str:
    """Returns the beginning of a text, or of the last message of a conversation."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[-1], dict):
        prompt = prompt[-1].get("content", "")
    if isinstance(prompt, list) and all(isinstance(part, dict) and "type" in part for part in prompt):
        prompt = "".join(str(part.get("text", f"[{part['type']}]")) for part in prompt)
    return str(prompt)[:PREVIEW]


def turns(conversation: list[Any]) -> str:
    """Returns the model's turns of a conversation."""
    said = [m for m in conversation if isinstance(m, dict) and m.get("role") == "assistant"]
    return " ⏎ ".join(str(m.get("content") or _called(m)) for m in said)[:PREVIEW]


def _called(message: dict[str, Any]) -> str:
    calls = message.get("tool_calls")
    functions = [c.get("function", c) for c in calls if isinstance(c, dict)] if isinstance(calls, list) else []
    return ", ".join(f"{f.get('name')}(…)" for f in functions if isinstance(f, dict))
