"""The memory that is predicted for an update is what one takes on the rehearsal's device, by torch's own count."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig

from accelerator.rehearse import DEVICE, REHEARSED, rehearse
from distflow.algo.losses import nll
from distflow.batch.context import Context
from distflow.config.loading import make_config
from distflow.config.schema import TrainConfig
from distflow.device.footprint import CONTEXT
from distflow.model.source import Source
from distflow.model.tokenizer import train_tokenizer
from distflow.observe.metrics import StepMetrics
from distflow.plan import Layout
from distflow.rehearsal.memory import full_batch, phases_of_worker
from distflow.run.program import Program
from distflow.train.trainer import RankMesh, Trainer, TrainerOptions
from distflow.train.update_spec import UpdateSpec

pytestmark = pytest.mark.skipif(not REHEARSED, reason="counts what the rehearsal's device allocates")

TOLERANCE = 0.1
MICRO_TOKENS, PROMPT, RESPONSE = 1024, 64, 64
SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 8192,
    "num_hidden_layers": 6,
}


def source() -> Source:
    return Source("small", AutoConfig.for_model("qwen2", **SHAPE), train_tokenizer(iter(["text"]), 0))


def measured(rank: int, checkpointing: bool) -> float:
    """Returns the most that was allocated at once while a trainer is made and makes two updates."""
    config = TrainConfig(micro_tokens=MICRO_TOKENS, gradient_checkpointing=checkpointing, dtype="float32")
    layout = Layout((0,), 1)
    mesh = DeviceMesh(DEVICE, torch.zeros(1, 1, dtype=torch.int), mesh_dim_names=("dp", "tp"))
    batch = full_batch(MICRO_TOKENS, PROMPT, RESPONSE)
    context = Context(1, 0, 1, layout, 0, StepMetrics(), Path(), batch.groups)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        trainer = Trainer("actor", source(), RankMesh(layout, mesh, 0), TrainerOptions(config))
        for _ in range(2):
            trainer.update(batch, UpdateSpec(nll, {}, "token-mean", 1, 10), context)
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


@pytest.mark.parametrize("checkpointing", [True, False])
def test_an_update_takes_what_is_predicted(checkpointing: bool, tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("def score(solution_str):\n    return 0.0\n")
    raw = {
        "flow": "grpo",
        "model": {"arch": "qwen2"},
        "reward": "reward.py:score",
        "data": {"files": "data.jsonl", "fields": ["prompt"], "batch": 8, "max_prompt": PROMPT},
        "rollout": {"max_tokens": RESPONSE, "kv_cache_gb": 0.1},
        "train": {"micro_tokens": MICRO_TOKENS, "gradient_checkpointing": checkpointing, "dtype": "float32"},
    }
    program = Program(make_config(raw, (), tmp_path, "the config", "test"))
    phases = phases_of_worker(program, program.config, source(), program.plan(1), 0)
    (predicted,) = (p.bytes - CONTEXT for p in phases if p.name == "update of actor")
    (found,) = rehearse(1, measured, checkpointing)
    assert predicted == pytest.approx(found, rel=TOLERANCE)
