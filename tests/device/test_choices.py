"""What is chosen for an accelerator: only what the user left open, the same whatever rank asks, and so that it fits."""

from pathlib import Path
from typing import Any

import pytest

from distflow.config.loading import make_config
from distflow.config.model_shape import load_model
from distflow.config.schema import Config
from distflow.device.choices import Chosen, choose, choose_tp
from distflow.device.offer import Offer
from distflow.device.process import ProcessSettings
from distflow.errors import ConfigError
from distflow.plan import Plan
from distflow.run.program import Program

APART = (
    "placement.ranks={r: 0-3, t: 4-7}",
    "placement.default={ranks: t}",
    "placement.nodes={actor.generate: {ranks: r}}",
)
LIMIT = {"limit of waits before the first step": "1800 s"}
H100 = Offer("cuda", "NVIDIA H100 80GB HBM3", 79 << 30, True)


def config_of(*overrides: str) -> Config:
    data = {"files": "data.jsonl", "fields": ["prompt"]}
    raw: dict[str, Any] = {"flow": "grpo", "data": data, "model": {"arch": "qwen2"}}
    raw["reward"] = {"model": {"arch": "qwen2"}}
    return make_config(raw, overrides, Path(), "the config", "test")


def chosen(
    model: str = "qwen2.5-7b", workers: int = 8, *overrides: str, offer: Offer | None = H100, vllm: str = ""
) -> Chosen:
    config = config_of(*overrides)
    plan: Plan = Program(config).plan(workers)
    shape = load_model(model)
    return choose(config, offer, plan, {"actor": shape, "reference": shape}, lambda: vllm)


def keys(result: Chosen) -> dict[str, Any]:
    return {c.key: c.value for c in result.choices}


def test_on_a_cpu_nothing_is_chosen() -> None:
    assert chosen(offer=None) == Chosen(config_of())


def test_an_accelerator_gets_what_it_is_good_at() -> None:
    result = chosen()
    assert keys(result) == {
        "train.dtype": "bfloat16",
        "train.gradient_checkpointing": True,
        "rollout.engine": "vllm",
        "rollout.max_sequences": 1024,
        "rollout.kv_cache_gb": result.config.rollout.kv_cache_gb,
        "allocator": "expandable_segments",
        "float32 products": "TF32",
        **LIMIT,
    }
    assert result.process == ProcessSettings(expandable_segments=True, tf32=True)
    assert 35 < result.config.rollout.kv_cache_gb < 60
    assert result.config.train.dtype == "bfloat16"
    assert all(c.reason for c in result.choices)


def test_float32_stays_exact_and_an_allocator_that_is_set_up_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:512")
    assert chosen("qwen2.5-7b", 8, "train.dtype=float32").process == ProcessSettings()


def test_what_the_user_sets_wins() -> None:
    given = {
        "train.dtype": "float32",
        "train.gradient_checkpointing": "false",
        "train.offload": "none",
        "rollout.engine": "builtin",
        "rollout.max_sequences": "256",
        "rollout.kv_cache_gb": "2",
    }
    words = [f"{key}={value}" for key, value in given.items()]
    result = chosen("qwen2.5-7b", 8, *words)
    assert (keys(result), result.config) == ({"allocator": "expandable_segments", **LIMIT}, config_of(*words))
    automatic = chosen("qwen2.5-7b", 8, *(f"{key}=auto" for key in given))
    assert automatic == chosen()


def test_without_vllm_the_built_in_engine_is_used_and_the_reason_said() -> None:
    (choice,) = (c for c in chosen(vllm="vLLM is not installed").choices if c.key == "rollout.engine")
    assert str(choice) == "rollout.engine: builtin (vLLM is not installed)"
    ahead = chosen("qwen2.5-7b", 8, "rollout.partial=4", "rollout.staleness=1", *APART)
    assert keys(ahead)["rollout.engine"] == "vllm"  # which can be interrupted


def test_a_device_without_bfloat16_computes_in_float32() -> None:
    assert "train.dtype" not in keys(chosen(offer=Offer("cuda", "old", 79 << 30, False)))


def test_state_is_offloaded_only_where_it_has_to_be() -> None:
    tp = "placement.nodes={actor.generate: {tp: 4}}"
    assert "train.offload" not in keys(chosen("qwen2.5-0.5b", 1))
    assert keys(chosen("qwen2.5-32b", 8, tp))["train.offload"] in ("optimizer", "all")
    small = Offer("cuda", "24 GB", 23 << 30, True)
    assert keys(chosen("qwen2.5-7b", 8, tp, offer=small))["train.offload"] in ("optimizer", "all")


def chosen_tp(model: str, workers: int, *overrides: str, offer: Offer | None = H100) -> int | None:
    """Returns the tp that is chosen for generation, None if none is."""
    shape = load_model(model)
    config, choices = choose_tp(
        config_of(*overrides), offer, lambda config: Program(config).plan(workers), {"actor": shape, "reference": shape}
    )
    assert len(choices) <= 1
    assert (config == config_of(*overrides)) == (not choices)
    if not choices:
        return None
    (choice,) = choices
    assert choice.key == "placement.nodes.actor.generate.tp"
    assert config.placement.nodes["actor.generate"].tp == choice.value
    return int(choice.value)


def test_generation_has_as_much_tensor_parallelism_as_the_weights_need() -> None:
    assert chosen_tp("qwen2.5-0.5b", 1) is None
    assert chosen_tp("qwen2.5-7b", 8) is None
    assert chosen_tp("qwen2.5-32b", 8) == 2
    assert chosen_tp("qwen2.5-72b", 32) == chosen_tp("qwen2.5-72b", 64) == 4
    small = Offer("cuda", "24 GB", 24 << 30, True)
    assert chosen_tp("qwen2.5-7b", 8, offer=small) in (2, 4)
    assert chosen_tp("qwen2.5-7b", 6, offer=small) == 2  # what divides ranks and heads
    assert chosen_tp("qwen2.5-32b", 8, offer=None) is None


def test_a_placement_of_the_users_own_keeps_its_tensor_parallelism() -> None:
    for tp in (1, 8):
        assert chosen_tp("qwen2.5-32b", 8, f"placement.nodes={{actor.generate: {{tp: {tp}}}}}") is None
    assert chosen_tp("qwen2.5-32b", 8, "placement.roles={actor: {tp: 1}}") is None
    assert chosen_tp("qwen2.5-32b", 8, "placement.default={dp: 8}") is None


def test_rank_sets_stay_where_only_tensor_parallelism_is_chosen() -> None:
    shape, config = load_model("qwen2.5-72b"), config_of(*APART)
    config, _ = choose_tp(config, H100, lambda c: Program(c).plan(8), {"actor": shape})
    place = config.placement.nodes["actor.generate"]
    assert (place.ranks, place.tp) == ("r", 4)


def test_the_cache_has_what_the_rest_leaves() -> None:
    whole, half = chosen(), chosen("qwen2.5-7b", 8, "rollout.gpu_memory_utilization=0.5")
    assert half.config.rollout.kv_cache_gb < whole.config.rollout.kv_cache_gb
    for result in (whole, half):
        assert max(p.bytes for p in result.phases) <= 0.96 * H100.memory
    # Half of the memory, without 15 GB of weights and what sampling needs.
    assert 18 < half.config.rollout.kv_cache_gb < 25


def test_a_share_of_the_memory_needs_an_accelerator_and_excludes_a_size() -> None:
    with pytest.raises(
        ConfigError, match=r"gpu_memory_utilization: there is no accelerator here; .* give rollout\.kv_cache_gb"
    ):
        chosen("qwen2.5-7b", 8, "rollout.gpu_memory_utilization=0.5", offer=None)
    with pytest.raises(ConfigError, match="give one of `kv_cache_gb`"):
        config_of("rollout.gpu_memory_utilization=0.5", "rollout.kv_cache_gb=3")


def test_ranks_apart_are_each_considered() -> None:
    split, together = chosen("qwen2.5-7b", 8, *APART), chosen()
    assert split.config.rollout.kv_cache_gb > together.config.rollout.kv_cache_gb  # no trainer is beside the engine
