"""What vLLM cannot do is refused with one message, before it is imported and anything is loaded."""

import sys
from functools import cache

import pytest
import torch

from distflow.config.schema import LoraConfig
from distflow.errors import ConfigError
from distflow.model.source import Source
from distflow.model.tokenizer import train_tokenizer
from distflow.plan import Layout
from distflow.rollout.vllm import support as vllm_support
from distflow.rollout.vllm.engine import cut_rows
from distflow.rollout.vllm.support import check_vllm
from distflow.weights.shards import Shards, TensorSpec
from tiny import config_of

CUDA = torch.device("cuda")


@cache
def source(arch: str) -> Source:
    return Source(f"a {arch}", config_of(arch), train_tokenizer(iter(["a text"]), 0))


def install(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    monkeypatch.setattr(vllm_support, "_version", lambda name: version if name == "vllm" else None)


def test_it_says_how_to_get_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, None)
    with pytest.raises(ConfigError, match=r"vLLM is not installed; pip install -e '\.\[vllm\]'.*engine: builtin"):
        check_vllm(source("qwen2"), None)


def test_a_mode_that_reaches_the_trainer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "0.32.1")
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")
    check_vllm(source("qwen2"), None)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(ConfigError, match=r"rollout\.engine: VLLM_BATCH_INVARIANT is set.*unset it"):
        check_vllm(source("qwen2"), None)


@pytest.mark.parametrize("version", ["0.31.4", "0.33.0", "1.0", "0.9.1rc2"])
def test_other_versions_are_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    install(monkeypatch, version)
    with pytest.raises(ConfigError, match=rf"vLLM {version} is installed.*from 0.32 to below 0.33"):
        check_vllm(source("qwen2"), None)


def test_models_that_are_not_tested_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "0.32.1")
    with pytest.raises(ConfigError, match=r"'a gemma2' is a Gemma2ForCausalLM, and vLLM is supported for Llama"):
        check_vllm(source("gemma2"), None)
    with pytest.raises(ConfigError, match=r"train.lora.rank: 1000, and vLLM has room for 512"):
        check_vllm(source("qwen2"), LoraConfig(rank=1000))
    check_vllm(source("qwen2"), LoraConfig(rank=512))
    assert "vllm" not in sys.modules


def test_embeddings_are_cut_in_padded_blocks_of_rows() -> None:
    specs = [
        TensorSpec("model.embed_tokens.weight", (61, 4)),
        TensorSpec("lm_head.weight", (130, 4)),
        TensorSpec("norm", (4,)),
    ]
    assert cut_rows(specs, 1) == {}
    blocks = cut_rows(specs, 2)
    assert blocks == {"model.embed_tokens.weight": 32, "lm_head.weight": 96}
    shards = Shards(Layout((0, 1), 1, 2), 1, blocks)
    assert [shards.box(s, r)[0] for s in specs[:2] for r in (0, 1)] == [(0, 32), (32, 61), (0, 96), (96, 130)]
