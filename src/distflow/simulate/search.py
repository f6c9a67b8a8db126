"""Proposes placements: dp × sp × tp of generation and training, on the same or separate ranks, and says why."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

from distflow.device.footprint import FITS
from distflow.errors import DistflowError
from distflow.plan.placement import Place, Placement
from distflow.plan.planner import Workload, plan
from distflow.plan.tasks import Plan
from distflow.run.program import Program
from distflow.simulate.costs import Costs
from distflow.simulate.hardware import Hardware
from distflow.simulate.memory import memory_of
from distflow.simulate.result import SimulatedStep
from distflow.simulate.walk import simulate
from distflow.util.text import human_bytes, seconds

GIB = 1 << 30
WORTH = 0.03  # a lever that gives less is not named
SHARES = (None, 25, 50, 75)  # percent of the ranks
_TP = (1, 2, 4, 8)
_ROLLOUT, _TRAIN = "rollout", "train"


class Shape(NamedTuple):
    """The ranges of a search."""

    rollout: int | None
    generate_tp: int
    train_tp: int
    train_sp: int = 1

    @property
    def name(self) -> str:
        place = "colocated" if self.rollout is None else f"split {self.rollout}:{100 - self.rollout}"
        sp = f" sp {self.train_sp}" if self.train_sp > 1 else ""
        return f"{place}, generate tp {self.generate_tp}, train tp {self.train_tp}{sp}"


@dataclass(frozen=True)
class Candidate:
    """A placement and the step predicted for it. `rollout`: percent of the ranks that only generate."""

    rollout: int | None
    generate_tp: int
    train_tp: int
    result: SimulatedStep
    train_sp: int = 1

    @property
    def shape(self) -> "Shape":
        return Shape(self.rollout, self.generate_tp, self.train_tp, self.train_sp)

    @property
    def name(self) -> str:
        return self.shape.name

    @property
    def memory(self) -> float:
        return max(r.memory.peak for r in self.result.rank_sets)

    @property
    def placement(self) -> dict[str, object]:
        """Returns the `placement` section of a config for this candidate."""
        ranks = {_ROLLOUT: f"0%-{self.rollout}%", _TRAIN: f"{self.rollout}%-"} if self.rollout else {}
        generate, train = (_ROLLOUT, _TRAIN) if self.rollout else ("all", "all")
        return {
            "ranks": ranks,
            "default": {"ranks": train},
            "train": {"ranks": train, "tp": self.train_tp} | ({"sp": self.train_sp} if self.train_sp > 1 else {}),
            "generate": {"ranks": generate, "tp": self.generate_tp},
        }


@dataclass(frozen=True)
class Found:
    """The result of a search: placements that fit, the fastest first; the bytes that the others would need."""

    candidates: tuple[Candidate, ...]
    too_large: Mapping[Shape, float]

    def reasons(self, overlap: float = 0.0, limit: float = math.inf) -> list[str]:
        """Says why the first one: beside the best with another value of each thing that was varied."""
        if not self.candidates:
            least = min(self.too_large.items(), key=lambda item: item[1], default=None)
            return [f"nothing fits; {least[0].name} needs least, {human_bytes(least[1])}"] if least else []
        best = self.candidates[0]
        reasons = []
        for field in Shape._fields:
            others = [c for c in self.candidates if getattr(c.shape, field) != getattr(best.shape, field)]
            if others:
                reasons.append(f"beside {others[0].name}: {_difference(best, others[0], overlap)}")
        if best.rollout is None:
            split = min((c for c in self.candidates if c.rollout is not None), key=_one_behind, default=None)
            if split is not None and _one_behind(split) < best.result.step_s:
                share = 100 * (1 - _one_behind(split) / best.result.step_s)
                reasons.append(f"{split.name} with rollout.staleness 1 would save {share:.0f} % (forecast)")
        if self.too_large:
            shape, size = min(self.too_large.items(), key=lambda item: item[1])
            text = f"{len(self.too_large)} others need more than {human_bytes(limit)}, {shape.name} {human_bytes(size)}"
            reasons.append(text)
        return list(dict.fromkeys(reasons))


def _one_behind(candidate: Candidate) -> float:
    return candidate.result.pipelined_s(1)


def _difference(best: Candidate, other: Candidate, overlap: float) -> str:
    """Says by how much the step of `other` is longer, and in which task most of that is."""
    mine, theirs = (c.result.pipelined_s(overlap) for c in (best, other))
    seconds_of = {t.name: t.elapsed_s for t in best.result.tasks}
    names = [t.name for t in other.result.tasks]
    delta = {t.name: t.elapsed_s - seconds_of.get(t.name, 0.0) for t in other.result.tasks}
    delta |= {name: -s for name, s in seconds_of.items() if name not in names}
    worst = max(delta, key=lambda name: delta[name])
    return f"{100 * (1 - mine / theirs):.0f} % shorter, {worst} by {seconds(delta[worst])}"


def search(program: Program, workers: int, hardware: Hardware, costs: Costs, overlap: float = 0.0) -> Found:
    """Returns the placements that fit the memory. Sequences are divided only if they are long or nothing fits."""
    sizes = [tp for tp in _TP if tp <= min(workers, hardware.workers_per_host)]
    shapes = [Shape(*each) for each in product(SHARES, sizes, sizes)]
    if costs.longest <= costs.micro_tokens:
        found = _simulated(program, workers, hardware, costs, shapes, overlap)
        if found.candidates:
            return found
    divided = [s._replace(train_sp=sp) for s in shapes for sp in sizes[1:]]
    shapes += [s for s in divided if s.train_tp * s.train_sp <= hardware.workers_per_host]
    return _simulated(program, workers, hardware, costs, shapes, overlap)


def levers(program: Program, workers: int, hardware: Hardware, costs: Costs, best: Candidate) -> list[str]:
    """Says which other keys would help the best placement, within the memory that it leaves free."""
    free = FITS * hardware.device.memory - best.memory
    cache = math.floor((costs.kv_cache + free) / GIB)
    tries = [(f"rollout.kv_cache_gb {cache}", replace(costs, kv_cache=float(cache * GIB)), 1)] if free > GIB else []
    tries.append(
        (f"train.micro_tokens {2 * costs.micro_tokens}", replace(costs, micro_tokens=2 * costs.micro_tokens), 1)
    )
    tries.append((f"data.batch {2 * program.config.data.batch}", costs, 2))
    said = []
    for name, changed, times in tries:
        found = _simulated(program, workers, hardware, changed, [best.shape], 0.0, times)
        for other in found.candidates:
            faster = times * best.result.step_s / other.result.step_s - 1
            if faster > WORTH:
                said.append(f"{name} would give {100 * faster:.0f} % more samples a second")
    return said


def colocated_and_split(program: Program, plan: Plan, hardware: Hardware, costs: Costs) -> tuple[Candidate, ...]:
    """Returns the plan's own dp × tp on the same and on separate ranks, the fastest first."""
    tp = {n.generates: plan.partition_of(n.id).layout.tp for n in plan.flow.nodes if n.generates or n.type == "train"}
    if len(tp) < 2:  # it does not generate, or does not train
        return ()
    shapes = [Shape(share, tp[True], tp[False]) for share in SHARES]
    return _simulated(program, plan.workers, hardware, costs, shapes, 0.0).candidates


def _simulated(
    program: Program,
    workers: int,
    hardware: Hardware,
    costs: Costs,
    shapes: Iterable[Shape],
    overlap: float,
    batches: int = 1,
) -> Found:
    """Simulates the shapes that fit, each on `batches` times the config's batch."""
    candidates, too_large = [], {}
    for shape in shapes:
        planned = _plan(program, workers, shape, costs, batches)
        if planned is None:
            continue
        peak = max(memory_of(planned, ranks[0], costs, hardware).peak for ranks in planned.chains())
        if peak > hardware.device.memory:
            too_large[shape] = peak
        else:
            result = simulate(planned, hardware, costs)
            candidates.append(Candidate(shape.rollout, shape.generate_tp, shape.train_tp, result, shape.train_sp))
    return Found(tuple(sorted(candidates, key=lambda c: c.result.pipelined_s(overlap))), too_large)


def _plan(program: Program, workers: int, shape: Shape, costs: Costs, batches: int = 1) -> Plan | None:
    """Plans a candidate; None if it does not fit the workers or the heads of a model."""
    for role, model in costs.models.items():
        cut = (shape.train_tp * shape.train_sp, *([shape.generate_tp] if role == "actor" else []))
        if any(model.heads % n for n in cut):
            return None
    ranks = {} if shape.rollout is None else {_ROLLOUT: f"0%-{shape.rollout}%", _TRAIN: f"{shape.rollout}%-"}
    train_set = "all" if shape.rollout is None else _TRAIN
    nodes = dict(_places(program, shape, costs))
    config = program.config
    try:
        placement = Placement(workers, ranks, Place(train_set), nodes=nodes)
        return plan(program.flow, placement, Workload(batches * config.data.batch, program.repeat, config.bytes))
    except DistflowError:
        return None


def _places(program: Program, shape: Shape, costs: Costs) -> Iterator[tuple[str, Place]]:
    rollout_set, train_set = ("all", "all") if shape.rollout is None else (_ROLLOUT, _TRAIN)
    for n in program.flow.nodes:
        if n.generates:
            yield n.id, Place(rollout_set, tp=shape.generate_tp)
        elif n.role in costs.models and n.type != "compute":
            sp = shape.train_sp if n.sequence_parallel else 1
            yield n.id, Place(train_set, tp=shape.train_tp, sp=sp)
