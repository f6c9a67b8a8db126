"""Whether the log-probs of a rollout are those of the trainer to the bit."""

import torch

from distflow.cpu import kernels_for
from distflow.cpu.modules import KNOWN
from distflow.model.source import Source
from distflow.plan.layout import Layout

_BY_LENGTH = ("dynamic", "longrope")


def difference(engine: str, source: Source, dtype: str, device: torch.device, *layouts: Layout) -> str | None:
    """Returns why they may differ; None: they are the same. `layouts`: of generation and training."""
    config = source.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    reasons = {
        f"the engine '{engine}' computes in another way than the trainer": engine != "builtin",
        f"kernels of {device.type} round by the shape of a batch": device.type != "cpu",
        f"{dtype} is multiplied by PyTorch, whose sums depend on the batch": dtype != "float32",
        "there are no CPU kernels without the extra `cpu`": kernels_for(torch.empty(0)) is None,
        "tensor parallelism adds up parts of products": any(layout.tp > 1 for layout in layouts),
        "positions are rotated by how long the longest sequence is": rope.get("rope_type") in _BY_LENGTH,
        f"nobody has compared them for {config.model_type} models": config.model_type not in KNOWN,
    }
    return next((reason for reason, applies in reasons.items() if applies), None)
