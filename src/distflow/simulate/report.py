"""The report of `distflow simulate`: a simulated step, a single controller, and other placements."""

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from distflow.errors import ConfigError
from distflow.plan.tasks import Plan
from distflow.run.program import Program
from distflow.simulate.binding import Assumptions, costs_of
from distflow.simulate.controller import ControllerResult, simulate_controller
from distflow.simulate.costs import Costs
from distflow.simulate.failures import Failures, Goodput, survive
from distflow.simulate.hardware import Hardware
from distflow.simulate.memory import check_memory
from distflow.simulate.result import SimulatedStep
from distflow.simulate.search import Candidate, Found, colocated_and_split, levers, search
from distflow.simulate.walk import simulate

_SHOWN = 12  # candidates of a search
SIZES = (1024, 10_000)  # workers for which failures are predicted, beside the config's
_MIXTURES = "published seconds of such are missed by up to 90 %, so compare placements and quote no seconds"


@dataclass(frozen=True)
class Report:
    """The step of a config on some hardware, and its comparisons."""

    plan: Plan
    hardware: Hardware
    costs: Costs
    result: SimulatedStep
    controller: ControllerResult
    alternatives: tuple[Candidate, ...]  # the same dp × tp, colocated and split
    candidates: tuple[Candidate, ...]  # of a search, the fastest first
    overlap: float
    reasons: tuple[str, ...] = ()  # for the first candidate
    drawn: tuple[float, ...] = ()  # seconds of steps with other lengths and devices, the shortest first
    survival: tuple[Goodput, ...] = ()

    @property
    def speedup(self) -> float:
        return self.controller.step_s / self.result.step_s if self.result.step_s else 1.0

    @property
    def assumptions(self) -> list[str]:
        c = self.costs
        models = ", ".join(f"{role}: {m.name} ({m.params / 1e9:.2f}B parameters)" for role, m in c.models.items())
        lengths = f"responses of {c.response_tokens:g} tokens on average, log-normal with σ {c.spread:g}, cut at"
        mixtures = [f"{m.name} is a mixture of experts: {_MIXTURES}" for m in c.models.values() if m.experts > 1]
        return [
            models or "no model: only nodes with given seconds take time",
            f"prompts of {c.prompt_tokens:g} tokens; {lengths} {c.max_tokens:g}; seed {c.seed}",
            *dict.fromkeys(mixtures),
            *self.result.notes,
        ]

    def to_json(self) -> dict[str, Any]:
        return {
            "flow": self.plan.flow.name,
            "plan": self.plan.hash,
            "hardware": self.hardware.name,
            "assumptions": self.assumptions,
            **self.result.to_json(),
            "controller": asdict(self.controller) | {"speedup": self.speedup},
            **({"forecast": {"overlap": self.overlap, "step_s": self.forecast(self.result)}} if self.overlap else {}),
            "alternatives": [self._candidate(c) for c in self.alternatives],
            **({"search": [self._candidate(c) for c in self.candidates]} if self.candidates else {}),
            **({"reasons": list(self.reasons)} if self.reasons else {}),
            **({"drawn": self.percentiles} if self.drawn else {}),
            **({"failures": [asdict(g) for g in self.survival]} if self.survival else {}),
        }

    @property
    def percentiles(self) -> dict[str, float]:
        """Seconds of a step: the mean of all that were drawn, and percentiles."""
        points = {f"p{p}": float(np.percentile(self.drawn, p)) for p in (5, 50, 95)}
        return {"steps": len(self.drawn), "mean": float(np.mean(self.drawn)), **points}

    def forecast(self, result: SimulatedStep) -> float:
        return result.pipelined_s(self.overlap)

    def _candidate(self, c: Candidate) -> dict[str, Any]:
        forecast = {"forecast_s": self.forecast(c.result)} if self.overlap else {}
        return {"name": c.name, "step_s": c.result.step_s, **forecast, "memory": c.memory, "placement": c.placement}


def make_report(
    program: Program,
    workers: int,
    hardware: Hardware,
    given: Assumptions,
    overlap: float = 0.0,
    wide: bool = False,
    draws: int = 0,
    failures: Failures | None = None,
) -> Report:
    """Simulates a config. `wide`: also all placements that fit. `draws`: so many steps with lengths of their own on
    devices of their own."""
    if draws < 0:
        raise ConfigError(f"--draws: {draws}; give a number of steps, 0 or more")
    if overlap < 0:
        raise ConfigError(f"--overlap: {overlap:g}; give the steps that generation may be ahead, 0 or more")
    plan = program.plan(workers, chunks=False)
    costs = costs_of(program, given)
    costs.check(plan)
    result = simulate(plan, hardware, costs)
    found = search(program, workers, hardware, costs, overlap) if wide else Found((), {})
    try:
        check_memory(plan, {r.ranks: r.memory for r in result.rank_sets}, hardware, costs)
    except ConfigError as e:
        if not found.candidates:
            raise
        best = found.candidates[0]
        raise ConfigError(f"{e}; of the placements that fit, {best.name} is the fastest: {best.placement}") from None
    controller = simulate_controller(plan, hardware, costs, result)
    alternatives = colocated_and_split(program, plan, hardware, costs)
    reasons = found.reasons(overlap, hardware.device.memory)
    if found.candidates:
        reasons += levers(program, workers, hardware, costs, found.candidates[0])
    return Report(
        plan,
        hardware,
        costs,
        result,
        controller,
        alternatives,
        found.candidates[:_SHOWN],
        overlap,
        tuple(reasons),
        tuple(sorted(simulate(plan, hardware, replace(costs, seed=costs.seed + k)).step_s for k in range(draws))),
        tuple(
            survive(result.step_s, program.config.checkpoint.every, n, hardware.workers_per_host, failures)
            for n in sorted({workers, *SIZES})
        )
        if failures
        else (),
    )
