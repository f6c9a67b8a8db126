"""What a config may give vLLM itself, and what its own sampler cannot do. vLLM itself is not needed."""

from typing import Any

import pytest
from pydantic import ValidationError

from distflow.config.schema import RolloutConfig
from distflow.errors import ConfigError
from distflow.rollout.vllm.arguments import check_arguments
from distflow.rollout.vllm.own_sampler import check_own_sampler, logprobs_mode

KNOWN = ("max_num_batched_tokens", "kv_cache_dtype", "max_num_seqs", "quantization")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("max_num_seqs", r"'max_num_seqs' is decided by `rollout.max_sequences`; set that"),
        ("quantization", r"'quantization' cannot be set: the weight sync fills weights as they are trained"),
        ("kv_cache_dtyp", r"'kv_cache_dtyp' is no argument of vLLM's EngineArgs.*kv_cache_dtype"),
    ],
)
def test_arguments_that_are_ours_or_nobodys_are_refused_by_name(name: str, message: str) -> None:
    check_arguments({"kv_cache_dtype": "fp8", "max_num_batched_tokens": 64}, KNOWN)
    with pytest.raises(ConfigError, match=r"^rollout\.vllm\.args: " + message):
        check_arguments({"kv_cache_dtype": "fp8", name: 1}, KNOWN)


def test_settings_of_vllm_need_that_engine() -> None:
    for settings in ({"args": {"kv_cache_dtype": "fp8"}}, {"sampler": "vllm"}):
        with pytest.raises(ValidationError, match="add `engine: vllm`"):
            RolloutConfig.model_validate({"vllm": settings})
        assert RolloutConfig.model_validate({"engine": "vllm", "vllm": settings}).vllm.model_fields_set == set(settings)


@pytest.mark.parametrize(
    ("changes", "mode"),
    [({}, "raw_logprobs"), ({"top_p": 0.9}, "raw_logprobs"), ({"temperature": 0.7}, "processed_logprobs")],
)
def test_its_own_sampler_has_log_probs_of_the_whole_distribution(changes: dict[str, Any], mode: str) -> None:
    config = RolloutConfig(engine="vllm", **changes)
    check_own_sampler(config)
    assert logprobs_mode(config) == mode


@pytest.mark.parametrize("key", ["top_p", "top_k", "min_p", "repetition_penalty", "min_tokens"])
def test_or_refuses(key: str) -> None:
    values: dict[str, Any] = {"top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2, "min_tokens": 3}
    with pytest.raises(ConfigError, match=rf"temperature of 0.7 only of what rollout\.{key} leaves"):
        check_own_sampler(RolloutConfig(engine="vllm", temperature=0.7, **{key: values[key]}))
