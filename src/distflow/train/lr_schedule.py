"""The learning rate, a pure function of the number of updates so far."""

import math

from distflow.config.schema import TrainerConfig


def learning_rate(config: TrainerConfig, update: int, total: int) -> float:
    """Returns the learning rate of update `update` (from 0) of `total`: linear warm-up, then the schedule."""
    warmup = config.warmup
    if update < warmup:
        return config.lr * (update + 1) / warmup
    progress = (update - warmup) / max(1, total - warmup)
    match config.schedule:
        case "constant":
            return config.lr
        case "linear":
            return config.lr * max(0.0, 1 - progress)
        case "cosine":
            return config.lr * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
