"""Layers that torch has compiled learn what they learn without."""

from functools import partialmethod
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from accelerator.scenarios import Case, infer, samples, update
from distflow.config.schema import TrainConfig
from distflow.train.trainer import RankMesh, Trainer, TrainerOptions
from spawn import spawn

CASES = [Case("qwen3", gradient_checkpointing=True), Case("qwen2", dp=2)]


def learned(rank: int, case: Case, compiled: bool) -> tuple[dict[str, float], Any]:
    config = TrainConfig(lr=1e-2, micro_tokens=24, gradient_checkpointing=case.gradient_checkpointing, compile=compiled)
    place = RankMesh(case.layout, case.mesh("cpu"), rank)
    trainer = Trainer("actor", case.source, place, TrainerOptions(config, temperature=0.8))
    return update(trainer, rank, case), infer(trainer, rank, case)


def both(rank: int, case: Case, backend: str) -> tuple[Any, Any, int]:
    """Returns metrics and log-probs without and with compiling, and how many graphs were made."""
    compile_module, made = nn.Module.compile, 0

    def count(graph: Any, inputs: Any) -> Any:
        nonlocal made
        made += 1
        return graph.forward if backend == "eager" else torch._inductor.compile(graph, inputs)

    nn.Module.compile = partialmethod(compile_module, backend=count)  # type: ignore[assignment]
    return learned(rank, case, False), learned(rank, case, True), made


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_losses_are_those_of_layers_that_are_not_compiled(case: Case, backend: str) -> None:
    for (metrics, logprobs), (same, close), made in spawn(case.dp, both, case, backend, timeout_s=600):
        assert same == pytest.approx(metrics, rel=1e-4, abs=1e-5)
        np.testing.assert_allclose(close, logprobs, atol=1e-4)
        assert 0 < made < 30, "made anew for each number of tokens"
        assert len({len(r) for r in samples()["response_tokens"]}) > 3
