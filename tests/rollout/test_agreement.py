"""Where rollout and trainer agree to the bit, and the first reason where they may not."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig

from distflow import cpu
from distflow.model.source import Source
from distflow.model.tokenizer import train_tokenizer
from distflow.plan.layout import Layout
from distflow.rollout.agreement import difference
from tiny import config_of

DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
TOKENIZER = train_tokenizer(iter(["a text"]), 0)
GPT = Source("gpt", AutoConfig.for_model("gpt2"), TOKENIZER)
CPU, TP1, TP2 = torch.device("cpu"), Layout((0, 1), dp=2), Layout((0, 1), dp=1, tp=2)


def source(arch: str = "qwen2", **changes: Any) -> Source:
    return Source(arch, config_of(arch, **changes), TOKENIZER)


def test_they_agree_on_a_cpu_in_float32() -> None:
    for arch in ("qwen2", "gemma2", "qwen3_moe"):
        assert difference("builtin", source(arch), "float32", CPU, TP1, TP1) is None


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (("vllm", source(), "float32", CPU, TP1), "the engine 'vllm'"),
        (("builtin", source(), "float32", torch.device("meta"), TP1), "kernels of meta"),
        (("builtin", source(), "bfloat16", CPU, TP1), "bfloat16"),
        (("builtin", source(), "float32", CPU, TP1, TP2), "tensor parallelism"),
        (("builtin", source("llama", rope_parameters=DYNAMIC), "float32", CPU, TP1), "positions are rotated"),
        (
            ("builtin", Source("gpt", AutoConfig.for_model("gpt2"), TOKENIZER), "float32", CPU, TP1),
            "nobody has compared",
        ),
    ],
)
def test_why_they_may_differ(given: Any, reason: str) -> None:
    why = difference(*given)
    assert why is not None
    assert why.startswith(reason)


def test_without_kernels_they_may_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_kernels", lambda: None)
    assert "extra `cpu`" in (difference("builtin", source(), "float32", CPU, TP1) or "")
