"""Encodes every prompt once, a share on each worker, so that a bad one fails before training starts."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from distflow.dataset.view import DatasetView
from distflow.errors import DataError
from distflow.model.text import Text
from distflow.plan.field_bytes import IMAGES

logger = logging.getLogger(__name__)
TOKENIZER_ROWS = 20_000  # whose text a tokenizer is trained on
_LISTED = 20
_CHARACTERS = 1 << 20  # of one text that a tokenizer is trained on


@dataclass(frozen=True)
class CheckedPrompts:
    rows: DatasetView  # usable rows
    skipped: list[str]  # the first of this worker's share, each with its place and the reason
    count: int  # skipped rows on all workers


def check_prompts(
    rows: DatasetView,
    text: Text,
    skip: bool,
    rank: int = 0,
    workers: int = 1,
    all_reduce: Callable[[Tensor, Callable[[Tensor, Tensor], Tensor]], Tensor] = lambda data, op: data,
) -> CheckedPrompts:
    """Finds rows whose prompt the model cannot read: raises with the row, or leaves it out on all workers.

    `all_reduce(data, op)` reduces over the workers; it is called by all if `skip` is set.
    """
    if "prompt" not in rows.column_names:
        return CheckedPrompts(rows, [], 0)
    warned = rank > 0
    bad: NDArray[np.bool_] = np.zeros(len(rows), bool)
    skipped = []
    for i in range(rank, len(rows), workers):
        row: dict[str, Any] = {}
        try:
            row = rows[i]
            text.encode(prompt := row["prompt"], row.get(IMAGES, ()))
            if not warned and (token := text.forged_token(prompt)):
                warned = True
                logger.warning(
                    "%s: the prompt has '%s'; special tokens in the text of prompts are encoded as ordinary text: if a"
                    " chat template has written these prompts, set data.rendered: true, or give chat messages",
                    rows.location(i),
                    token,
                )
        except DataError as e:
            message = f"{rows.location(i)}: {e}"
            if not skip:
                raise DataError(f"{message} – fix the row or set `data.on_bad_row: skip`") from None
            bad[i] = True
            skipped.append(message)
        if text.images:
            text.images.forget(row.get(IMAGES, ()))
    if skip:
        bad = all_reduce(torch.from_numpy(bad), torch.logical_or).numpy()
    if not bad.any():
        return CheckedPrompts(rows, [], 0)
    good = np.flatnonzero(~bad)
    if not len(good):
        raise DataError(f"all {len(bad)} rows were skipped: {skipped[0] if skipped else 'see the other workers'}")
    return CheckedPrompts(rows.select(good), skipped[:_LISTED], int(bad.sum()))


def texts(rows: DatasetView, most: int = TOKENIZER_ROWS) -> Iterator[str]:
    """Yields all text in the first rows, to train a tokenizer on."""
    for i in range(min(len(rows), most)):
        yield from _text_in(list(rows[i].values()))


def _text_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value[:_CHARACTERS].encode(errors="replace").decode()  # JSON can have lone surrogates
    elif isinstance(value, list):
        for v in value:
            yield from _text_in(v)
    elif isinstance(value, dict):
        yield from _text_in(list(value.values()))
