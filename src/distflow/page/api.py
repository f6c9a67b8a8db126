"""Answers the requests of the page: a word and some parameters, answered with JSON."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from distflow.config.differences import flat
from distflow.errors import DistflowError
from distflow.page.run_folder import RunFolder
from distflow.page.runs import run_row
from distflow.page.step_view import MAX_LANES
from distflow.plan.layout import parse_ranks

Params = Mapping[str, str]


class RequestError(DistflowError):
    """A request that has no answer."""


class Api:
    """Answers requests about some runs; `run` is the place of one in the list."""

    def __init__(self, runs: Sequence[RunFolder], follow: bool = False) -> None:
        self.folders, self.follow = runs, follow
        self.requests: dict[str, Callable[[RunFolder, Params], Any]] = {
            "overview": lambda run, params: run.overview(),
            "config": lambda run, params: {key: json.dumps(value) for key, value in flat(run.config())},
            "metrics": lambda run, params: run.metrics(),
            "plan": lambda run, params: run.plan(),
            "samples": lambda run, params: run.samples.table(),
            "changed": lambda run, params: run.signature(),
            "sample": self._sample,
            "lanes": self._lanes,
            "step": self._step,
        }

    def answer(self, word: str, params: Params) -> Any:
        if word == "runs":
            return {"runs": [{"name": r.name, "path": str(r.path)} for r in self.folders], "follow": self.follow}
        if word == "list":
            return {"runs": [run_row(r) for r in self.folders]}
        if word not in self.requests:
            raise RequestError(f"there is no '{word[:40]}'")
        number = _number(params, "run")
        if number >= len(self.folders):
            raise RequestError(f"there is no run {number}")
        return self.requests[word](self.folders[number], params)

    def _sample(self, run: RunFolder, params: Params) -> Any:
        sample = run.samples.sample(_number(params, "step", -1), params.get("split", "train"), _number(params, "id"))
        if sample is None:
            raise RequestError("this sample was not recorded, or dropped to keep the file small")
        return sample

    def _lanes(self, run: RunFolder, params: Params) -> Any:
        """Lanes of single workers, or a heat map of all if they are many and none are chosen."""
        step, workers = _number(params, "step", -1), run.ranks()
        chosen: list[int] | None = None
        if "ranks" in params and workers:
            try:
                chosen = list(parse_ranks(params["ranks"], max(workers) + 1, "ranks"))[:MAX_LANES]
            except DistflowError as e:
                raise RequestError(str(e)) from None
        if chosen is None and len(workers) > MAX_LANES:
            return {"fleet": run.step(step).fleet()}
        view = run.step(step, chosen)
        return {"lanes": view.lanes(chosen)}

    def _step(self, run: RunFolder, params: Params) -> Any:
        view = run.step(_number(params, "step", -1))
        path = [
            [s.rank, s.name, s.kind, start - view.start, end - view.start] for s, start, end in view.critical_path()
        ]
        return {
            "step": view.step,
            "length": view.end - view.start,
            "nodes": view.nodes(),
            "path": path,
            "traffic": view.traffic(),
        }


def _number(params: Params, name: str, lowest: int = 0) -> int:
    text = params.get(name, "0")
    if not text.lstrip("-").isdecimal() or len(text) > 15 or int(text) < lowest:
        raise RequestError(f"{name}: '{text[:40]}' is out of range")
    return int(text)
