"""The engine on a device that refuses CPU tensors: it runs to the end, and its results are those of the CPU."""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from accelerator.rehearsal_device import MEMORY
from accelerator.rehearse import DEVICE, REHEARSED, rehearse
from accelerator.scenarios import PARAMS, Case, exchange, roll_out, save_and_restore, sync_weights, train
from distflow.config.schema import RolloutConfig
from distflow.errors import ConfigError
from distflow.rollout.builtin.engine import BuiltinEngine
from distflow.rollout.engine import EngineSetup
from distflow.train.logprobs import token_logprobs

TRAINED = [
    Case(),
    Case("gemma2", gradient_checkpointing=True),
    Case("mistral"),
    Case(values=True),
    Case("qwen2", dp=2),
    Case(tp=2),
    Case("llama", dp=2, dtype="bfloat16"),
    Case(dp=2, lora=True),
]
BFLOAT16 = Case("llama", dtype="bfloat16")
ROLLED_OUT: dict[Case, tuple[str, ...]] = {
    Case("gemma2"): tuple(PARAMS),
    **dict.fromkeys([Case("qwen2"), Case("qwen3"), Case("mistral"), Case("llama", tp=2), BFLOAT16], ("plain",)),
}
SAVED = [Case(), Case(dp=2)]


def workers(case: Case) -> int:
    return case.dp * case.tp


def message_of_a_large_cache(rank: int) -> str:
    config, one = RolloutConfig(kv_cache_gb=2 * MEMORY / (1 << 30)), Case()
    where = one.layout, one.mesh(DEVICE), rank
    with pytest.raises(ConfigError) as error:
        BuiltinEngine(EngineSetup(one.source, *where, config, torch.float32, torch.device(DEVICE), 64))
    return str(error.value)


def rounding_of_logprobs() -> float:
    """Returns the largest error of log-probs in bfloat16 that the inputs do not have already."""
    noise = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(shape, generator=noise).bfloat16() for shape in ((30, 64), (500, 64)))
    targets = torch.arange(30)
    got, _ = token_logprobs(hidden.to(DEVICE), weight.to(DEVICE), None, targets.to(DEVICE))
    want = (hidden.double() @ weight.double().T).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    return float((got.cpu() - want).abs().max())


def all_cases(rank: int, n: int, folder: str) -> dict[str, dict[Case, Any]]:
    """Runs all cases of n workers, in the same processes."""
    results: dict[str, dict[Case, Any]] = {
        "trained": {case: train(rank, case) for case in TRAINED if workers(case) == n},
        "rolled out": {case: roll_out(rank, case, names) for case, names in ROLLED_OUT.items() if workers(case) == n},
        "saved": {case: save_and_restore(rank, case, f"{folder}/{n}") for case in SAVED if workers(case) == n},
    }
    if n == 1:
        results["rounding"] = {Case(): rounding_of_logprobs()}
    if n == 1 and REHEARSED:
        results["large cache"] = {Case(): message_of_a_large_cache(rank)}
    if n == 2:
        sync_weights(rank)
        exchange(rank, "1")
        exchange(rank, "0")
    return results


Results = Callable[[int], list[dict[str, dict[Case, Any]]]]  # of each rank, by number of workers


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("checkpoints")
    return cache(lambda n: rehearse(n, all_cases, n, str(folder)))


@pytest.mark.parametrize("case", TRAINED, ids=str)
def test_a_trainer_learns_the_same(results: Results, case: Case) -> None:
    rough = case.dtype == "bfloat16"
    for result in results(workers(case)):
        (ours, outputs), (theirs, expected) = result["trained"][case]
        assert ours == pytest.approx(theirs, rel=0.1 if rough else 1e-3, abs=0.05 if rough else 1e-4)
        assert np.abs(outputs - expected).mean() < (0.1 if rough else 1e-4)


@pytest.mark.parametrize("case", SAVED, ids=str)
def test_a_restored_trainer_continues_as_if_nothing_had_happened(results: Results, case: Case) -> None:
    for result in results(workers(case)):
        continued, restored = result["saved"][case]
        assert (continued == restored).all()


@pytest.mark.parametrize("case", ROLLED_OUT, ids=str)
def test_the_rollout_engine_generates_the_same_tokens(results: Results, case: Case) -> None:
    for result in results(workers(case)):
        for ours, theirs in result["rolled out"][case].values():
            assert ours.waits <= 1  # a forward pass, and the host waits for its tokens
            assert np.isfinite(ours.logprobs).all()
            if case != BFLOAT16:
                assert ours.tokens == theirs.tokens
                np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-4)


@pytest.mark.skipif(DEVICE == "cpu", reason="a product in bfloat16 is rounded there")
def test_logits_of_a_product_in_bfloat16_are_not_rounded(results: Results) -> None:
    assert results(1)[0]["rounding"][Case()] < 1e-4  # 0.05 if they are


def test_weights_and_samples_arrive(results: Results) -> None:
    """The workers check it themselves."""
    assert results(2)


@pytest.mark.skipif(not REHEARSED, reason="depends on the memory of the device")
def test_a_kv_cache_that_the_device_cannot_hold_is_refused(results: Results) -> None:
    assert results(1)[0]["large cache"][Case()] == (
        "rollout.kv_cache_gb: 8.0 GiB of KV cache do not fit on rehearsal, which has 4.0 GiB; lower it"
    )
