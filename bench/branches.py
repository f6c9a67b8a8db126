"""An update on samples with several histories: what these share packed once, or each history whole. See agents.py."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from distflow.algo.losses import policy
from distflow.batch.batch import Batch, Ragged
from distflow.batch.branches import branches_column
from distflow.batch.context import Context
from distflow.config.schema import TrainConfig
from distflow.model.source import Source
from distflow.observe.metrics import StepMetrics
from distflow.plan.layout import Layout
from distflow.train.trainer import RankMesh, Trainer, TrainerOptions
from distflow.train.update_spec import UpdateSpec

SAMPLES, HISTORIES, PROMPT, FIRST, OWN = 4, 4, 64, 320, 64  # tokens of a prompt, the first history, and a further one
SHARED = PROMPT + FIRST * 3 // 4  # of a further history with the first one


def batch(shared: bool, vocabulary: int) -> Batch:
    """Returns samples with one advantage each. Not shared: a history is a row, with what it shares as context."""
    draw = np.random.default_rng(0)
    prompts, responses, masks, trees, advantages = [], [], [], [], list[float]()
    for _ in range(SAMPLES):
        advantage = float(draw.standard_normal())
        prompt, first, *further = (
            torch.from_numpy(draw.integers(0, vocabulary, n)) for n in (PROMPT, FIRST, *[OWN] * (HISTORIES - 1))
        )
        if shared:
            rows = [(torch.cat((first, *further)), torch.ones(FIRST + OWN * len(further)))]
            trees.append([(FIRST + OWN * i, 0, SHARED) for i in range(len(further))])
        else:
            context = first[: SHARED - PROMPT]
            rows = [(first, torch.ones(FIRST))]
            rows += [
                (torch.cat((context, own)), torch.cat((torch.zeros(len(context)), torch.ones(OWN)))) for own in further
            ]
        for tokens, mask in rows:
            prompts.append(prompt)
            responses.append(tokens)
            masks.append(mask.to(torch.int8))
            advantages.append(advantage)
    columns: dict[str, Any] = {
        "prompt_tokens": Ragged.of(prompts),
        "response_tokens": Ragged.of(responses),
        "response_mask": Ragged.of(masks),
        "advantage": torch.tensor(advantages),
    }
    if shared:
        columns["response_branches"] = branches_column(trees)
    ids = np.arange(len(prompts))
    return Batch(ids, ids, columns)


class Update:
    """One rank's trainer, whose weights stay as they are."""

    def __init__(self, model: str, shared: bool) -> None:
        from transformers import AutoConfig, AutoTokenizer

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        mesh = DeviceMesh("cpu", torch.zeros(1, 1, dtype=torch.int64), mesh_dim_names=("dp", "tp"))
        config = AutoConfig.from_pretrained(model)
        source = Source("talker", config, AutoTokenizer.from_pretrained(model), Path(model))
        self.layout = Layout((0,), 1)
        self.trainer = Trainer(
            "actor", source, RankMesh(self.layout, mesh, 0), TrainerOptions(TrainConfig(lr=0.0, micro_tokens=4096))
        )
        self.batch = batch(shared, config.vocab_size)
        self.samples = SAMPLES

    def run(self) -> dict[str, Any]:
        metrics = StepMetrics()
        ctx = Context(0, 0, 1, self.layout, 0, metrics, Path(), np.arange(SAMPLES))
        self.trainer.update(self.batch, UpdateSpec(policy, {}, "token-mean", 1, 1), ctx)
        total, count = metrics.totals["actor/grad_norm", "mean"]
        return {"turns": SAMPLES * HISTORIES, "grad_norm": total / count}
