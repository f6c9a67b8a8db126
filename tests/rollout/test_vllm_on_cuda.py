"""What vLLM is asked for on CUDA, as far as that can be seen without CUDA, and with a stub instead of vLLM."""

import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from accelerator.scenarios import Case
from distflow.config.schema import RolloutConfig, VllmConfig
from distflow.rollout.engine import EngineSetup
from distflow.rollout.vllm import engine
from distflow.rollout.vllm.engine import VllmEngine, config_folder
from distflow.rollout.vllm.start import start_vllm

CUDA = torch.device("cuda", 1)


class AskedError(Exception):
    """Ends the start of an engine, with what it was asked for."""


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Modules of vLLM that know what is asked for, and no more."""

    class LLMEngine:
        @staticmethod
        def from_engine_args(given: Any, enable_multiprocessing: bool) -> None:
            assert not enable_multiprocessing
            raise AskedError(vars(given))

    class Executor:
        pass

    modules: Mapping[str, Mapping[str, Any]] = {
        "vllm": {"EngineArgs": SimpleNamespace},
        "vllm.v1": {},
        "vllm.v1.engine": {},
        "vllm.v1.engine.core": {},
        "vllm.v1.engine.llm_engine": {"LLMEngine": LLMEngine},
        "vllm.v1.executor": {},
        "vllm.v1.executor.uniproc_executor": {"UniProcExecutor": Executor},
        "vllm.v1.worker": {},
        "vllm.v1.worker.gpu_worker": {"init_distributed_environment": None},
    }
    for name, values in modules.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    monkeypatch.setattr(engine, "make_sampler", lambda logprobs: "our sampler")
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))


def asked(config: RolloutConfig) -> dict[str, Any]:
    """Returns the arguments with which an engine of one rank would start."""
    case = Case("qwen2")
    mesh: Any = None
    with pytest.raises(AskedError) as error:
        VllmEngine(EngineSetup(case.source, case.layout, mesh, 0, config, torch.bfloat16, CUDA, 64))
    result: dict[str, Any] = error.value.args[0]
    return result


def test_it_has_graphs_sleeps_and_takes_many_tokens_at_once(stub: None) -> None:
    given = asked(RolloutConfig(engine="vllm", kv_cache_gb=0.01, max_sequences=1024))
    expected = {
        "enforce_eager": False,
        "enable_sleep_mode": True,
        "block_size": None,
        "max_num_batched_tokens": 8192,
        "max_num_seqs": 1024,
        "hf_overrides": {"head_dtype": "float32"},
        "logits_processors": ["our sampler"],
        "async_scheduling": False,
        "kv_cache_memory_bytes": int(0.01 * (1 << 30)),
    }
    assert {key: given[key] for key in expected} == expected


def test_what_the_user_gives_wins(stub: None) -> None:
    args = {"max_num_batched_tokens": 4096, "enforce_eager": True, "hf_overrides": {"rope_theta": 5.0}}
    given = asked(RolloutConfig(engine="vllm", kv_cache_gb=0.01, vllm=VllmConfig(args=args)))
    assert (given["max_num_batched_tokens"], given["enforce_eager"]) == (4096, True)
    assert given["hf_overrides"] == {"head_dtype": "float32", "rope_theta": 5.0}


def test_its_own_sampler_schedules_ahead(stub: None) -> None:
    given = asked(RolloutConfig(engine="vllm", kv_cache_gb=0.01, vllm=VllmConfig(sampler="vllm")))
    assert given["async_scheduling"]
    assert "logits_processors" not in given


def test_the_folder_of_a_model_is_the_same_at_every_start(stub: None) -> None:
    first, again, other = (config_folder(Case(arch).source) for arch in ("qwen2", "qwen2", "llama"))
    assert first == again != other
    assert (Path(first) / "config.json").exists()


def test_a_rank_uses_its_own_device(stub: None) -> None:
    with pytest.raises(AskedError) as error:
        start_vllm((2, 3), 3, CUDA, {})
    executor = error.value.args[0]["distributed_executor_backend"]
    name, rank, local = executor()._distributed_args()
    assert name.endswith("-2")
    assert (rank, local) == (1, 1)
