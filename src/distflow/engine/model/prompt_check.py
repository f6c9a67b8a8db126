"""Before the first step, every prompt is looked at once, each worker a share: a bad one is told now, not at night."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from distflow.data.balance import Ints
from distflow.data.dataset_view import DatasetView
from distflow.engine.model.text import Text
from distflow.errors import DataError

_SHOWN = 20


@dataclass(frozen=True)
class Screened:
    rows: DatasetView
    skipped: list[str]  # the first ones this worker knows of
    count: int


def screen(rows: DatasetView, text: Text, skip: bool, rank: int, workers: int) -> Screened:
    """Rows whose prompt the model can read. An unusable one is an error that names it, or is left out everywhere."""
    if "prompt" not in rows.names:
        return Screened(rows, [], 0)
    bad: Ints = np.zeros(len(rows), np.int64)
    told = []
    for i in range(rank, len(rows), workers):
        try:
            text.encode(rows[i]["prompt"])
        except DataError as e:
            where = f"{rows.describe(i)}: {e}"
            if not skip:
                raise DataError(f"{where} – mend the row or set `data.on_bad_row: skip`") from None
            bad[i] = 1
            told.append(where)
    if skip and workers > 1:
        everybody = torch.from_numpy(bad)
        dist.all_reduce(everybody)
    if not bad.any():
        return Screened(rows, [], 0)
    kept = np.flatnonzero(bad == 0)
    if not len(kept):
        raise DataError(f"all {len(bad)} rows were skipped: {told[0] if told else 'see the other workers'}")
    return Screened(rows.keep(kept), told[:_SHOWN], int(bad.sum()))


def texts(rows: DatasetView, most: int = 20_000) -> Iterator[str]:
    """All text in the first rows, for a tokenizer to learn from."""
    for i in range(min(len(rows), most)):
        yield from _text_in(list(rows[i].values()))


def _text_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value.encode(errors="replace").decode()  # JSON can say half a character
    elif isinstance(value, list):
        for v in value:
            yield from _text_in(v)
    elif isinstance(value, dict):
        yield from _text_in(list(value.values()))
