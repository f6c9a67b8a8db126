"""The same flow with a single controller: every field goes through its link and its memory, node after node."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from distflow.plan.tasks import Plan, RunNode
from distflow.simulate.costs import Costs
from distflow.simulate.hardware import Hardware
from distflow.simulate.result import SimulatedStep


@dataclass(frozen=True)
class ControllerResult:
    """A step of a single controller. Its samples are padded to the longest allowed, as is usual."""

    step_s: float
    data_plane_s: float
    bytes: float  # through the link of the driver
    memory: float  # of the driver
    largest_batch: int  # prompts that fit its memory
    node_s: Mapping[str, float]  # node → seconds in which the driver sends its inputs and receives its outputs


def simulate_controller(plan: Plan, hardware: Hardware, costs: Costs, result: SimulatedStep) -> ControllerResult:
    """Predicts the step of a driver that calls node after node; workers compute as in `result`.

    A call sends a model's workers the whole batch so far, field by field, encoded and decoded by one process, and
    brings back what they write. What is no model's (rewards, advantages) the driver computes itself. The weight sync is
    peer to peer, as in `result`.
    """
    driver = hardware.controller
    longest = costs.max_tokens if np.isfinite(costs.max_tokens) else costs.response_tokens
    padded = replace(costs, prompt_tokens=max(costs.prompt_tokens, costs.max_prompt or 0.0))
    lengths = np.full(plan.samples, longest)
    times = {t.name: t for t in result.tasks}
    compute = sent = 0.0
    nodes: dict[str, float] = {}
    batch: list[str] = list(plan.flow.source)
    for task in (t for t in plan.tasks if isinstance(t, RunNode)):
        compute += times[task.name].elapsed_s
        node = plan.flow.node(task.node)
        size = calls = 0.0
        own = node.type == "compute" or not node.method or (node.role == "reward" and "reward" not in costs.models)
        if not own:
            size = float(padded.sample_bytes(plan, (*batch, *task.writes), lengths).sum())
            calls = 2 * len(task.ranks) * driver.call_s
        nodes[task.node] = size / driver.serialise_rate + size / driver.rate + calls
        sent += size
        batch += task.writes
    fields = tuple(plan.flow.writer)
    per_sample = float(padded.sample_bytes(plan, fields, lengths[:1])[0])
    data, weights = sum(nodes.values()), result.seconds_of("weights")
    prompts = int(driver.memory / max(driver.copies * per_sample * plan.repeat, 1e-9))
    memory = driver.copies * per_sample * plan.samples
    return ControllerResult(compute + data + weights, data + weights, sent, memory, prompts, nodes)
