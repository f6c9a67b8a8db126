"""Proposes placements: dp × tp of generation and training, on the same or separate ranks."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product

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

SHARES = (None, 25, 50, 75)  # percent of the ranks
_TP = (1, 2, 4, 8)
_ROLLOUT, _TRAIN = "rollout", "train"


@dataclass(frozen=True)
class Candidate:
    """A placement and the step predicted for it. `rollout`: percent of the ranks that only generate."""

    rollout: int | None
    generate_tp: int
    train_tp: int
    result: SimulatedStep

    @property
    def name(self) -> str:
        place = "colocated" if self.rollout is None else f"split {self.rollout}:{100 - self.rollout}"
        return f"{place}, generate tp {self.generate_tp}, train tp {self.train_tp}"

    @property
    def placement(self) -> dict[str, object]:
        """The `placement` section of a config for this candidate."""
        ranks = {_ROLLOUT: f"0%-{self.rollout}%", _TRAIN: f"{self.rollout}%-"} if self.rollout else {}
        generate, train = (_ROLLOUT, _TRAIN) if self.rollout else ("all", "all")
        return {
            "ranks": ranks,
            "default": {"ranks": train},
            "train": {"ranks": train, "tp": self.train_tp},
            "generate": {"ranks": generate, "tp": self.generate_tp},
        }


def search(program: Program, workers: int, hardware: Hardware, costs: Costs, overlap: float = 0.0) -> list[Candidate]:
    """Returns the placements that fit the memory, the fastest first."""
    sizes = [tp for tp in _TP if tp <= min(workers, hardware.workers_per_host)]
    shapes = product(SHARES, sizes, sizes)
    return _simulated(program, workers, hardware, costs, shapes, overlap)


def colocated_and_split(program: Program, plan: Plan, hardware: Hardware, costs: Costs) -> list[Candidate]:
    """Returns the plan's own dp × tp on the same and on separate ranks, the fastest first."""
    tp = {n.generates: plan.partition_of(n.id).layout.tp for n in plan.flow.nodes if n.generates or n.type == "train"}
    if len(tp) < 2:  # it does not generate, or does not train
        return []
    shapes = [(share, tp[True], tp[False]) for share in SHARES]
    return _simulated(program, plan.workers, hardware, costs, shapes, 0.0)


def _simulated(
    program: Program,
    workers: int,
    hardware: Hardware,
    costs: Costs,
    shapes: Iterable[tuple[int | None, int, int]],
    overlap: float,
) -> list[Candidate]:
    candidates = []
    for share, generate, train in shapes:
        planned = _plan(program, workers, share, generate, train, costs)
        if planned is not None and all(
            memory_of(planned, ranks[0], costs, hardware).peak <= hardware.device.memory for ranks in planned.chains()
        ):
            candidates.append(Candidate(share, generate, train, simulate(planned, hardware, costs)))
    return sorted(candidates, key=lambda c: c.result.pipelined_s(overlap))


def _plan(program: Program, workers: int, share: int | None, generate: int, train: int, costs: Costs) -> Plan | None:
    """Plans a candidate; None if it does not fit the workers or the heads of a model."""
    for role, model in costs.models.items():
        if model.heads % train or (role == "actor" and model.heads % generate):
            return None
    ranks = {} if share is None else {_ROLLOUT: f"0%-{share}%", _TRAIN: f"{share}%-"}
    rollout_set, train_set = ("all", "all") if share is None else (_ROLLOUT, _TRAIN)
    nodes = dict(_places(program, rollout_set, train_set, generate, train, costs))
    config = program.config
    try:
        placement = Placement(workers, ranks, Place(train_set), nodes=nodes)
        return plan(program.flow, placement, Workload(config.data.batch, program.repeat, config.bytes))
    except DistflowError:
        return None


def _places(
    program: Program, rollout_set: str, train_set: str, generate: int, train: int, costs: Costs
) -> Iterator[tuple[str, Place]]:
    for n in program.flow.nodes:
        if n.generates:
            yield n.id, Place(rollout_set, tp=generate)
        elif n.role in costs.models and n.type != "compute":
            yield n.id, Place(train_set, tp=train)
