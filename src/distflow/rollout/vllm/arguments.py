"""Arguments of vLLM that a config gives itself, under `rollout.vllm.args`; arguments that DistFlow sets are refused."""

from collections.abc import Collection, Mapping
from typing import Any

from distflow.errors import ConfigError, cut, suggest

_KEYS = {
    "model": "model", "tokenizer": "model", "dtype": "train.dtype", "seed": "seed",
    "max_model_len": "rollout.max_tokens", "max_num_seqs": "rollout.max_sequences",
    "kv_cache_memory_bytes": "rollout.kv_cache_gb", "num_gpu_blocks_override": "rollout.kv_cache_gb",
    "gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "tensor_parallel_size": "placement", "data_parallel_size": "placement",
    "enable_lora": "train.lora", "max_lora_rank": "train.lora", "max_loras": "train.lora",
    "async_scheduling": "rollout.vllm.sampler", "logprobs_mode": "rollout.vllm.sampler",
}  # fmt: skip
_REASONS = {
    "pipeline_parallel_size": "the layers of an engine are not divided; use tp or dp in `placement`",
    "distributed_executor_backend": "each worker runs its part of the engine itself",
    "load_format": "weights come by the weight sync",
    "quantization": "the weight sync fills weights as they are trained",
    "enable_sleep_mode": "memory is released where others need it",
    "logits_processors": "it is the sampler's; use `rollout.vllm.sampler: vllm` and see whether you need one",
    "speculative_config": "neither sampler knows its tokens",
    "skip_tokenizer_init": "prompts and responses are token ids",
    "generation_config": "the parameters of sampling are those of `rollout`",
    "disable_log_stats": "nobody reads them",
}


def check_arguments(given: Mapping[str, Any], known: Collection[str]) -> None:
    """Raises if an argument is set elsewhere, cannot be set, or is none of vLLM's `known` ones."""
    for name in given:
        where = f"rollout.vllm.args: '{cut(name)}'"
        if key := _KEYS.get(name):
            raise ConfigError(f"{where} is decided by `{key}`; set that")
        if reason := _REASONS.get(name):
            raise ConfigError(f"{where} cannot be set: {reason}")
        if name not in known:
            raise ConfigError(f"{where} is no argument of vLLM's EngineArgs{suggest(name, known)}")
