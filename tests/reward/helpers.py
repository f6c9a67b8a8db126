"""Helpers of the reward tests."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch

from distflow import Batch, Context
from distflow.batch.batch import Column, Ragged
from distflow.observe.metrics import StepMetrics
from distflow.reward.reward import Reward
from distflow.sandbox.sandbox import Sandbox, SandboxError
from limits import wait_until

HERE = Path(__file__).parent
FILE = "user_rewards.py"


def batch_of(responses: Sequence[str], **columns: Any) -> Batch:
    """Returns a batch of samples with ids 100, 101, …"""
    n = len(responses)
    fields: dict[str, Column] = {
        "prompt": [f"question {i}" for i in range(n)],
        "response": list(responses),
        "response_tokens": Ragged.of([torch.arange(len(r)) for r in responses]),
        **columns,
    }
    return Batch(np.arange(100, 100 + n), np.arange(n), fields)


def context(held_out: bool = False) -> Context:
    """Returns the part of a context that rewards use."""
    recorded: dict[str, Any] = {}
    record = SimpleNamespace(sample=lambda ids, columns: recorded.update(columns), columns=recorded)
    rest = {"is_dp_leader": True, "held_out": held_out, "record": record}
    return cast(Context, SimpleNamespace(step=3, steps=10, metrics=StepMetrics(), **rest))


def totals_of(ctx: Context) -> dict[Any, tuple[float, float]]:
    """Returns (total, count) by (name, reduction)."""
    assert isinstance(ctx.metrics, StepMetrics)
    return ctx.metrics.totals


def metrics_of(ctx: Context) -> dict[str, float]:
    """Returns the metrics as a single worker would report them."""
    return {n: v / c if reduce == "mean" else v for (n, reduce), (v, c) in totals_of(ctx).items()}


@contextmanager
def rewarding(*functions: str | dict[str, Any], **options: Any) -> Iterator[Reward]:
    entries = [{"call": f"{FILE}:{f}"} if isinstance(f, str) else f for f in functions]
    reward = Reward(entries, **{"processes": 1, "base": HERE, **options})
    try:
        yield reward
    finally:
        reward.close()


def score(reward: Reward, batch: Batch, ctx: Context | None = None) -> list[float]:
    column = reward.score(batch, ctx or context())["score"]
    assert column.dtype is torch.float32
    result: list[float] = column.tolist()
    return result


def gone(pid: int) -> bool:
    """Whether no process has this pid, or only a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat.rpartition(")")[2].split()[0] in "ZX"


def pids_in(path: Path) -> list[int]:
    wait_until(path.exists)
    return [int(p) for p in path.read_text().split()]


def children_of(pid: int) -> set[int]:
    """Returns the living child processes."""
    children = set()
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            state, parent = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[:2]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(parent) == pid and state not in "ZX":
            children.add(int(entry))
    return children


def missing_protection() -> str:
    """Returns why model-written programs cannot be run here; empty if they can."""
    try:
        Sandbox().close()
    except SandboxError as e:
        return str(e)
    return ""
