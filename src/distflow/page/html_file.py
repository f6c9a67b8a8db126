"""The page of a run as one HTML file that needs no server and no network, with a selection of what was recorded."""

import base64
import gzip
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from urllib.parse import urlencode

from distflow.page.api import Api
from distflow.page.assets import LIBRARY_SCRIPT, LIBRARY_STYLE, SCRIPTS, STYLES, files, page
from distflow.page.run_folder import RunFolder
from distflow.page.step_view import MAX_LANES

MAX_STEPS, MAX_SAMPLES, MAX_BYTES = 40, 400, 6 << 20  # of a run; bytes of samples before compression


def html_file(runs: Sequence[RunFolder]) -> str:
    """Returns the page with data of these runs inside. Scripts other than its own are forbidden by their hashes."""
    assets = files()
    script = "\n".join(assets[name].decode() for name in (LIBRARY_SCRIPT, *SCRIPTS))
    style = "\n".join(assets[name].decode() for name in (LIBRARY_STYLE, *STYLES))
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:; base-uri 'none'"
    )
    packed = gzip.compress(json.dumps(_data(runs), separators=(",", ":")).encode(), 9, mtime=0)
    data = f'<script type="application/octet-stream" id="embedded">{base64.b64encode(packed).decode()}</script>'
    meta = f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    return page(f"<style>{style}</style>", f"{data}<script>{script}</script>", meta)


def _data(runs: Sequence[RunFolder]) -> dict[str, Any]:
    """Returns request → answer, for all requests that the page can make of this file."""
    api = Api(runs)
    data: dict[str, Any] = {word: api.answer(word, {}) for word in ("runs", "list")}
    for number, run in enumerate(runs):
        for word, params in _requests(run):
            params = {"run": str(number), **params}
            data[f"{word}?{urlencode(params)}"] = api.answer(word, params)
        overview = data[f"overview?run={number}"]
        overview["steps_recorded"] = _spread(overview["steps_recorded"], MAX_STEPS)
        _add_samples(data, number, run)
    return data


def _requests(run: RunFolder) -> Iterator[tuple[str, dict[str, str]]]:
    for word in ("overview", "config", "metrics", "plan"):
        yield word, {}
    workers = run.ranks()
    for step in _spread(run.steps(), MAX_STEPS if len(workers) <= MAX_LANES else 4):
        yield "lanes", {"step": str(step)}
        yield "step", {"step": str(step)}
        if len(workers) > MAX_LANES:
            for first in range(0, workers[-1] + 1, 32):
                yield "lanes", {"step": str(step), "ranks": f"{first}-{min(first + 32, workers[-1] + 1) - 1}"}


def _add_samples(data: dict[str, Any], number: int, run: RunFolder) -> None:
    """Adds the table, and as many whole samples as fit; of all others the table has the beginning."""
    data[f"samples?run={number}"] = run.samples.table()
    size = 0
    for step, split, sample in reversed(_spread(run.samples.recorded(), MAX_SAMPLES)):
        value = run.samples.sample(step, split, sample)
        size += len(json.dumps(value))
        if size > MAX_BYTES:
            break
        params = {"run": number, "step": step, "split": split, "id": sample}
        data[f"sample?{urlencode(params)}"] = value


def _spread(values: Iterable[Any], count: int) -> list[Any]:
    """Returns at most `count` of the values, evenly spread, with the first and the last."""
    values = list(values)
    if len(values) <= count:
        return values
    return [values[round(i * (len(values) - 1) / (count - 1))] for i in range(count)]


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
