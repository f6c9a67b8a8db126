"""Weights & Biases: WANDB_MODE=offline writes below the run's folder; what is not set comes from WANDB_…"""

import hashlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

import wandb

from distflow.observe.trackers.tracker import COLUMNS, RunInfo


class WeightsAndBiases:
    def __init__(self, run: RunInfo) -> None:
        # A run that is resumed goes on as the same one: its id follows from its folder.
        name = hashlib.sha256(str(run.folder.resolve()).encode()).hexdigest()[:12]
        self.run = wandb.init(
            project=run.settings.get("project") or os.environ.get("WANDB_PROJECT", "distflow"),
            name=run.settings.get("name") or run.name,
            **{key: run.settings[key] for key in ("entity", "group", "tags") if run.settings.get(key)},
            dir=str(run.folder),
            config=dict(run.config),
            settings=wandb.Settings(silent=True, console="off"),
            id=name,
            resume="allow" if run.first else None,
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.run.log(dict(metrics), step=step)

    def samples(self, step: int, rows: Sequence[Sequence[Any]]) -> None:
        self.run.log({"samples": wandb.Table(columns=list(COLUMNS), data=[list(r) for r in rows])}, step=step)

    def close(self) -> None:
        self.run.finish()


open_tracker = WeightsAndBiases
