"""The step of the optimiser: a skipped one leaves nothing behind, decay is of matrices alone, a clip has its norm."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from distflow.algo.losses import policy
from distflow.batch.batch import Batch
from distflow.train import fsdp
from distflow.train.trainer import Trainer
from distflow.train.update_spec import UpdateSpec
from distributed.test_gradients import WHOLE, Case, context, make_trainer, samples, share_of
from spawn import spawn
from tiny import pair

CASE = Case("qwen2", dp=2, micro_tokens=WHOLE)
SPEC = UpdateSpec(policy, {}, "token-mean", 12, 8)


def trainer_of(rank: int, folder: Path, **config: Any) -> Trainer:
    made = make_trainer(CASE, rank, folder, **config)
    assert made is not None
    return made


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: shard.clone() for name, shard in trainer.base_weights().items()}


def update(trainer: Trainer, rank: int, folder: Path, advantage: Tensor) -> dict[Any, tuple[float, float]]:
    """Trains on the samples with these advantages; returns the metrics."""
    batch = samples()
    batch = Batch(batch.ids, batch.groups, {**batch.columns, "advantage": advantage})
    ctx = context(rank, CASE.layout, folder)
    trainer.update(share_of(rank, batch, CASE.layout), SPEC, ctx)
    return ctx.metrics.totals  # type: ignore[attr-defined]


def on_a_worker(rank: int, folder: Path) -> dict[str, Any]:
    advantage = torch.linspace(-1, 1, 10)
    broken = advantage.clone()
    broken[0] = torch.nan  # of a sample of rank 0
    # 1. A step whose gradient is not finite, and one after it.
    trainer, other = (trainer_of(rank, folder, lr=1e-3) for _ in range(2))
    before = weights(trainer)
    skipped = update(trainer, rank, folder, broken)
    unchanged = all(torch.equal(w, before[n]) for n, w in weights(trainer).items())
    then = update(trainer, rank, folder, advantage)
    update(other, rank, folder, advantage)  # has never had the first one
    same = all(torch.equal(w, weights(other)[n]) for n, w in weights(trainer).items())
    # 2. Nothing but decay: all advantages are 0.
    trainer = trainer_of(rank, folder, lr=0.1, weight_decay=0.5)
    before = weights(trainer)
    update(trainer, rank, folder, torch.zeros(10))
    dims = {spec.name: len(spec.shape) for spec in trainer.specs}
    decayed = {dim: [(before[n], w) for n, w in weights(trainer).items() if dims[n] == dim] for dim in (1, 2)}
    kept = all(torch.equal(a, b) for a, b in decayed[1])
    shrunk = all(torch.allclose(b, 0.95 * a) for a, b in decayed[2])
    # 3. A gradient that is clipped.
    trainer, norms = trainer_of(rank, folder, clip_grad=0.01), list[float]()

    def keep() -> None:
        scale = trainer.optimizer.grad_scale  # type: ignore[union-attr]
        own = [s.grad / scale for s in trainer.optimized if s.grad is not None]
        norms.append(float(sum(g.double().square().sum() for g in own)))

    assert trainer.optimizer is not None
    trainer.optimizer.step = keep  # type: ignore[method-assign, assignment]
    clipped = update(trainer, rank, folder, advantage)
    biases = len(decayed[1])
    assert fsdp.sharding(trainer.mesh).size() == 2
    return {
        "skipped": (skipped, then, unchanged, same, trainer.updates),
        "decay": (biases, kept, shrunk),
        "clip": (norms, clipped["actor/grad_norm", "mean"]),
    }


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("optimizer")
    pair("qwen2").eager.save_pretrained(folder / "qwen2")
    return spawn(2, on_a_worker, folder)


def test_a_step_whose_gradient_is_not_finite_is_skipped_counted_once_and_leaves_nothing_behind(
    workers: list[dict[str, Any]],
) -> None:
    for skipped, then, unchanged, same, _ in (w["skipped"] for w in workers):
        assert skipped["actor/skipped_updates", "sum"][0] == 0.5  # on two workers: once
        assert unchanged
        assert ("actor/skipped_updates", "sum") not in then
        assert same


def test_weight_decay_is_of_matrices_not_of_norms_and_biases(workers: list[dict[str, Any]]) -> None:
    for biases, kept, shrunk in (w["decay"] for w in workers):
        assert biases > 5
        assert kept
        assert shrunk


def test_a_gradient_is_clipped_to_its_norm_over_all_workers(workers: list[dict[str, Any]]) -> None:
    logged = {w["clip"][1] for w in workers}
    ((norm, count),) = logged  # all workers know the same one
    assert norm / count > 0.02  # before it was clipped
    assert sum(w["clip"][0][0] for w in workers) ** 0.5 == pytest.approx(0.01, rel=1e-4)
