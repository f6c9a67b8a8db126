"""The plan of a step: layouts, placement, tasks and the planner. Pure; imports no torch."""

from distflow.plan.layout import Layout, format_ranks, parse_ranks
from distflow.plan.placement import Place, Placement
from distflow.plan.planner import Workload, plan
from distflow.plan.tasks import (
    Edge,
    Free,
    Load,
    Merge,
    Move,
    Partition,
    Plan,
    Resample,
    RunNode,
    Split,
    SyncWeights,
    Task,
)

__all__ = [
    "Edge",
    "Free",
    "Layout",
    "Load",
    "Merge",
    "Move",
    "Partition",
    "Place",
    "Placement",
    "Plan",
    "Resample",
    "RunNode",
    "Split",
    "SyncWeights",
    "Task",
    "Workload",
    "format_ranks",
    "parse_ranks",
    "plan",
]
