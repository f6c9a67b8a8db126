"""The trainer's log-probs of a stale run's responses, by the weights that generated them."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from distflow.batch.batch import Batch, Ragged
from distflow.checkpoint.store import load_full_tensors
from distflow.cpu.modules import use_cpu_modules
from distflow.model import attention
from distflow.run_folder import checkpoint_dir
from distflow.train.heads import LogprobHead
from distflow.train.packing import pack

Sample = tuple[list[int], list[int], list[float]]  # tokens of the prompt and of the response, the rollout's log-probs


@torch.no_grad()
def largest_difference(run_dir: Path, version: int, samples: Iterable[Sample]) -> float:
    """Returns how far log-probs are from those of the checkpoint of these weights."""
    actor = checkpoint_dir(run_dir / "checkpoints", version) / "actor"
    options: dict[str, Any] = {"attn_implementation": attention.NAME, "dtype": torch.float32}
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(actor / "model"), **options)
    use_cpu_modules(model)
    weights = load_full_tensors(actor)
    for name, p in model.named_parameters():
        p.data = weights[f"weights.{name}"]
    prompts, tokens, sampled = ([torch.tensor(column) for column in columns] for columns in zip(*samples, strict=True))
    ids = np.arange(len(sampled))
    packed = pack(Batch(ids, ids, {"prompt_tokens": Ragged.of(prompts), "response_tokens": Ragged.of(tokens)}), ids)
    parts = packed.model_tokens.spread(LogprobHead(model)(packed, 1.0)[0])
    gaps = [(part - sampled[i]).abs().max() for i, part in zip(packed.index, parts, strict=True)]
    return float(torch.stack(gaps).max())
