"""The learning rate as a function of how many updates were made: there is no state to keep."""

import math

from distflow.config.schema import LearnConfig


def learning_rate(config: LearnConfig, update: int, total: int) -> float:
    """For update `update` (from 0) of `total`: up in `warmup` updates, then as the schedule says."""
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
