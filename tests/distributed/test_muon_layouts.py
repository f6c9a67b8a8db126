"""Muon on real workers: any layout has the same weights, and another one resumes with the same momentum."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from distflow.train.muon import MUON_MOMENTS
from distributed.test_gradients import (
    Case,
    Parts,
    context,
    in_parts,
    make_trainer,
    samples,
    shapes,
    update_spec,
    whole,
)
from spawn import spawn
from tiny import pair

ARCHITECTURES = ("qwen3", "qwen3_moe")
LAYOUTS = ((1, 1), (2, 1), (1, 2), (2, 2), (4, 1))
CASES = [Case(arch, dp, tp, 24) for arch in ARCHITECTURES for dp, tp in LAYOUTS]


def train(rank: int, case: Case, folder: Path) -> tuple[Parts, dict[str, Parts]] | None:
    trainer = make_trainer(case, rank, folder, optimizer="muon", lr=5e-3, weight_decay=0.1)
    if trainer is None:
        return None
    batch = samples()
    batch = batch.select(np.array_split(np.arange(len(batch)), case.dp)[case.layout.replica_of(rank) or 0])
    for _ in range(2):
        trainer.update(batch, update_spec(), context(rank, case.layout, folder))
    state = trainer.state()
    momentum: dict[str, Parts] = {}
    for prefix in (f"{key}." for key in (*MUON_MOMENTS, "exp_avg")):
        names = [n for n in state.tensors if n.startswith(prefix)]
        boxes = {n: tuple(slice(lo, hi) for lo, hi in state.box(n, rank)) for n in names}
        momentum[prefix] = {n.removeprefix(prefix): (boxes[n], state.tensors[n].numpy()) for n in names}
    return in_parts(trainer, rank, [w.clone() for w in trainer.weights().values()]), momentum


def on_a_worker(rank: int, folder: Path) -> list[Any]:
    return [train(rank, case, folder) for case in CASES]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, list[tuple[Parts, dict[str, Parts]]]]:
    folder = tmp_path_factory.mktemp("muon")
    for arch in ARCHITECTURES:
        pair(arch).eager.save_pretrained(folder / arch)
    of_ranks = spawn(4, on_a_worker, folder)
    return {case: [r[i] for r in of_ranks if r[i] is not None] for i, case in enumerate(CASES)}


def joined(case: Case, results: Any, kind: str | None = None) -> dict[str, Tensor]:
    parts = [weights if kind is None else momentum[kind] for weights, momentum in results[case]]
    return whole({n: s for n, s in shapes(case.arch).items() if n in parts[0]}, parts, rtol=1e-3)


@pytest.mark.parametrize("case", [c for c in CASES if (c.dp, c.tp) != (1, 1)], ids=str)
def test_any_layout_has_the_same_weights_and_momentum(results: Any, case: Case) -> None:
    alone = Case(case.arch, 1, 1, 24)
    ours, theirs = joined(case, results), joined(alone, results)
    start = {n: p.detach() for n, p in pair(case.arch).eager.named_parameters()}
    assert any(not torch.allclose(theirs[n], start[n], atol=1e-3) for n in theirs if n in start)
    for name in theirs:
        assert torch.allclose(ours[name], theirs[name], rtol=1e-3, atol=1e-4), name
    ours, momenta = (joined(c, results, "momentum_buffer.") for c in (case, alone))
    for name in momenta:
        assert torch.allclose(ours[name], momenta[name], rtol=1e-3, atol=1e-6), name
    adamw = joined(alone, results, "exp_avg.")
    assert {"model.embed_tokens.weight", "model.norm.weight"} <= adamw.keys()
    assert adamw.keys() & momenta.keys() == set()
    assert adamw.keys() | momenta.keys() == theirs.keys()
    assert sum(".layers." in name for name in momenta) == len(momenta) == 2 * (7 + (case.arch == "qwen3_moe"))


def test_an_update_is_not_that_of_a_shard(results: Any) -> None:
    """What a rank would get by itself is not orthogonal over the whole: the test above would see it."""
    from distflow.train.muon import orthogonal

    momentum = joined(Case("qwen3", 1, 1, 24), results, "momentum_buffer.")
    matrix = next(m for n, m in momentum.items() if n.endswith("q_proj.weight"))
    halves = torch.cat([orthogonal(half) for half in matrix.chunk(2)])
    assert float((orthogonal(matrix) - halves).abs().max()) > 0.05
