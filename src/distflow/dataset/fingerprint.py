"""Recognises the rows of a run when it resumes: those it has drawn from must be the same; more may follow them."""

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from distflow.dataset.view import DatasetView
from distflow.util.arrays import Ints

_BLOCKS = 1024  # of all files, that are read: smaller files completely, larger ones at even distances


def fingerprint(rows: DatasetView) -> dict[str, Any]:
    """Returns what identifies the rows of a run: of each file how many there are and a hash, and which are used."""
    files = rows.dataset.files
    blocks = _blocks(len(files))
    return {
        "rows": len(rows),
        "selected": _selected(rows, [f.count for f in files])[1],
        "files": [[f.path.name, f.count, f.digest(f.count, blocks)] for f in files],
    }


def changes(rows: DatasetView, recorded: Mapping[str, Any]) -> str | None:
    """Returns how rows differ from those of a fingerprint; None if they are the same, or the same with more behind."""
    files, known = rows.dataset.files, recorded["files"]
    for i, (name, count, digest) in enumerate(known):
        if i >= len(files):
            return f"the data file {name} is no longer there"
        file = files[i]
        what = str(file.path) if file.path.name == name else f"{file.path}, which is where {name} was,"
        if file.count < count:
            return f"{what} has {file.count} rows, of {count} when the checkpoint was written"
        if file.digest(count, _blocks(len(known))) != digest:
            return f"the first {count} rows of {what} have changed since the checkpoint was written"
        if file.count > count and i < len(known) - 1:
            return f"{what} has more rows than when the checkpoint was written, and rows of other files come after them"
    number, selected = _selected(rows, [count for _, count, _ in known])
    if (number, selected) != (recorded["rows"], recorded["selected"]):
        return (
            f"of the same rows {number} are used now, and other ones or {recorded['rows']} were when the checkpoint was"
            " written (data.on_bad_row, data.max_prompt, data.fields, or the model's tokenizer has changed)"
        )
    return None


def _blocks(files: int) -> int:
    return max(8, _BLOCKS // max(1, files))


def _selected(rows: DatasetView, counts: list[int]) -> tuple[int, str]:
    """Returns how many of the first rows of each file are used, and a hash that says which."""
    bad = [file.bad[file.bad < count] for file, count in zip(rows.dataset.files, counts, strict=False)]
    good = sum(counts) - sum(len(b) for b in bad)
    chosen: Ints = np.arange(good) if rows.indices is None else rows.indices[rows.indices < good]
    parts = [*bad, chosen if len(chosen) < good else np.empty(0, np.int64)]
    return len(chosen), hashlib.sha256(b"|".join(p.tobytes() for p in parts)).hexdigest()[:16]
