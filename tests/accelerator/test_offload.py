"""Offloading changes where weights and moments are between uses, and no result: memory that was freed reads as NaN."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from torch import Tensor

from accelerator.rehearse import DEVICE, REHEARSED, rehearse
from accelerator.scenarios import Case, infer, make_trainer, resident, save_and_restore, share, update
from distflow.config.schema import Offload
from distflow.train import offload
from tiny import VOCABULARY, config_of

CHOICES: tuple[Offload, ...] = ("none", "optimizer", "all")
WEIGHT, MOMENTS = 4, 8  # bytes per parameter
HIDDEN, LAYERS = config_of("qwen3").hidden_size, config_of("qwen3").num_hidden_layers


def train_offloaded(rank: int, case: Case) -> list[tuple[dict[str, float], Any, Any, int, int]]:
    """Returns for each choice: metrics, log-probs, what a weight sync would send, resident bytes, parameters."""
    results = []
    for choice in CHOICES:
        given = replace(case, offload=choice)
        trainer = make_trainer(rank, given, DEVICE)
        metrics = update(trainer, rank, given)
        weights = {name: tensor.cpu().numpy() for name, tensor in trainer.weights().items()}
        assert {t.device.type for t in dict(trainer.weights()).values()} == {DEVICE}
        count = sum(w.size for w in weights.values())
        results.append((metrics, infer(trainer, rank, given), weights, resident(trainer), count))
    return results


@pytest.mark.parametrize("case", [Case(dp=2), Case(dp=2, dtype="bfloat16", gradient_checkpointing=True)], ids=str)
def test_offloading_changes_where_the_state_is_and_not_the_result(case: Case) -> None:
    for rank in rehearse(2, train_offloaded, case):
        (metrics, logprobs, weights, all_of_it, count), *offloaded = rank
        assert not REHEARSED or all_of_it == (WEIGHT + MOMENTS) * count
        for (other, theirs, synced, held, _), expected in zip(offloaded, (WEIGHT * count, 0), strict=True):
            assert other == metrics
            assert (theirs == logprobs).all()
            assert all((synced[name] == weights[name]).all() for name in weights)
            assert not REHEARSED or held == expected


def train_with_activations_away(rank: int, case: Case) -> list[tuple[dict[str, float], list[tuple[int, ...]]]]:
    """Returns without and with offloading: metrics, and the shapes of what came to the host in forward passes."""
    results = []
    for away in (False, True):
        shapes: list[tuple[int, ...]] = []

        def to_host(tensor: Tensor, shapes: list[tuple[int, ...]] = shapes) -> Tensor:
            shapes.append(tuple(tensor.shape))
            return tensor.cpu()

        given = replace(case, offload_activations=away)
        with patch.object(offload, "_LEAST", 0), patch.object(offload, "to_host", to_host):
            results.append((update(make_trainer(rank, given, DEVICE), rank, given), shapes))
    return results


@pytest.mark.parametrize("checkpointing", [False, True])
def test_activations_are_in_host_memory_between_forward_and_backward(checkpointing: bool) -> None:
    case = Case(dp=2, dtype="bfloat16", gradient_checkpointing=checkpointing)
    for (metrics, none), (same, away) in rehearse(2, train_with_activations_away, case):
        assert same == metrics
        assert not none
        inputs = [shape for shape in away if len(shape) == 3 and shape[-1] == HIDDEN]  # [1, tokens, hidden]
        assert len(inputs) >= 2 * LAYERS  # of each layer, in each of two updates
        assert VOCABULARY not in {size for shape in away for size in shape}  # no weight of the output layer, no logits


@pytest.mark.parametrize("choice", ["optimizer", "all"])
def test_an_offloaded_state_is_restored_from_its_checkpoint(choice: Offload, tmp_path: Path) -> None:
    for rank in rehearse(1, save_and_restore, Case(offload=choice), str(tmp_path)):
        assert (rank[0] == rank[1]).all()


def averaged(rank: int, case: Case) -> bool:
    trainer = make_trainer(rank, case, DEVICE)
    before = infer(trainer, rank, case)
    update(trainer, rank, case)
    with trainer.on_device():
        inside = trainer.infer(share(rank, case)).values.numpy()
    return bool((before != inside).any() and (inside == infer(trainer, rank, case)).all())


def test_uses_inside_of_a_use_leave_the_weights_where_they_are() -> None:
    assert all(rehearse(1, averaged, Case(offload="all")))
