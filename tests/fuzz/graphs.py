"""Flows written as lists of nodes, on rank sets and layouts of all kinds: some fit, most do not."""

import json
from pathlib import Path
from random import Random
from typing import Any

from distflow.errors import shown
from distflow.flow import from_list
from distflow.flow.yaml_flow import KEYS
from distflow.plan import Place, Placement, Workload, plan
from distflow.plan.svg import svg
from distflow.plan.table import render
from fuzz.configs import CODE
from fuzz.harness import Case
from fuzz.junk import TEXTS, junk

CALLS = (
    "own.py:length",
    "own.py:anything",
    "own.py:anything",
    "judge.score",
    "judge",
    "plain",
    "plain.x",
    "own.py:Judge",
)
FIELDS = ("text", "answer", "a", "b", "c", "n0", "n1", "n2", "n3", "n4")
TYPES = ("compute", "inference", "train", "trian", "", 3)
RANKS = ("0", "0-1", "1-", "0%-50%", "50%-", "all", "0,2", "3-1", "0-0", "0,0", "-1", "1%", "0-99", "x", "", " 1 , 2 ")


def plain(batch: Any, **constants: Any) -> None: ...


class Judge:
    def score(self, batch: Any, ctx: Any, strict: bool = False) -> None: ...


class Graphs:
    name, quick, full = "graphs", 500, 4000

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "own.py").write_text(CODE)

    def close(self) -> None:
        pass

    def case(self, rng: Random, number: int) -> Case:
        wild = rng.random() < 0.6
        entries = [self._entry(i, rng, wild) for i in range(rng.randrange(0 if wild else 1, 6))]
        called = {shown(e.get("call")).strip("'").partition(".")[0] for e in entries if isinstance(e, dict)}
        roles = {r: p for r, p in (("judge", Judge), ("plain", plain)) if r in called or (wild and rng.random() < 0.05)}
        ids = [e["id"] for e in entries if isinstance(e, dict) and isinstance(e.get("id"), str)]
        workers = rng.choice((1, 2, 4, 8, 6)) if rng.random() < 0.95 else rng.choice((0, -1, 10**9, 1024))
        rank_sets = {
            rng.choice(("g", "h", "all" if wild else "k")): rng.choice(RANKS) for _ in range(rng.randrange(3) * wild)
        }

        def place() -> Place:
            ranks = rng.choice((*rank_sets, "all", "all", *(["none"] if wild else [])))
            dp, tp = (rng.choice((None, None, 1, 2, 3, 8)), rng.choice((1, 1, 2, 4, 0, 10**12))) if wild else (None, 1)
            return Place(ranks, dp, tp)

        nodes = {rng.choice((*ids, "data", "x" if wild else "data")): place() for _ in range(rng.randrange(3) * wild)}
        of_roles = {rng.choice(("judge", "compute", "plain")): place() for _ in range(int(wild and rng.random() < 0.2))}
        work = Workload(
            rng.choice((8, 24, 24, 1, 7, 10**18)), rng.choice((1, 2, 3)), {"text": rng.choice((8, 0, 10**18))}
        )

        def run() -> None:
            flow = from_list("listed", ("text", "answer"), entries, roles, self.folder)
            result = plan(flow, Placement(workers, rank_sets, Place(), of_roles, nodes), work)
            json.dumps(result.to_json())
            assert result.hash
            render(result)
            if number % 5 == 0:
                svg(result)

        text = f"{shown(entries, 500)} workers {workers} rank sets {rank_sets} nodes {nodes} roles {of_roles} {work}"
        return Case(text, run, ("node", "flow 'listed'", "placement", "workers"))

    def _entry(self, i: int, rng: Random, wild: bool) -> Any:
        if wild and rng.random() < 0.02:
            return junk(rng)
        earlier = [f"n{k}" for k in range(i)]
        entry: dict[Any, Any] = {"id": f"n{i}", "call": rng.choice(CALLS[:3])}
        if rng.random() < 0.5:
            entry["reads"] = rng.sample(("text", "answer", *earlier), rng.randrange(min(3, i + 3)))
        if earlier and rng.random() < 0.5:
            entry[rng.choice(("deps", "after"))] = rng.choice(earlier)
        if rng.random() < 0.2:
            entry[rng.choice(("whole_groups", "whole_batch"))] = True
        if not wild:
            return entry
        for _ in range(rng.choice((0, 0, 1, 1, 2))):
            key = rng.choice((*KEYS, "junk"))
            entry[key] = self._value(key, rng)
        return entry

    def _value(self, key: str, rng: Random) -> Any:
        if rng.random() < 0.3:
            return junk(rng)
        match key:
            case "call":
                return rng.choice((*CALLS, *TEXTS))
            case "type":
                return rng.choice(TYPES)
            case "id":
                return rng.choice(("n0", "n1", "x", "data", "a b", "é"))
            case "dynamic_sampling":
                return rng.choice((0, 1, 3, -1, True, 10**30))
            case "params":
                return {rng.choice(("scale", "table", "strict", "batch", "any", 1)): junk(rng) for _ in range(2)}
            case "whole_groups" | "whole_batch":
                return rng.random() < 0.5
            case "balance" | "prefix" | "role":
                return rng.choice((*FIELDS, "a_", "judge"))
        return rng.choice((rng.choice(FIELDS), rng.sample(FIELDS, rng.randrange(4)), [*FIELDS[:2], FIELDS[0]]))
