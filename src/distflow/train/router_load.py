"""Measures the routers of a mixture of experts in a step: the load of experts, and choices unlike the rollout's."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from distflow.algo.router import balance_loss, expert_counts
from distflow.batch.context import MetricLog
from distflow.model.experts import ExpertsBlock, Routing
from distflow.train.packing import Pack

STARVED = 0.1  # share of the mean load below which an expert learns next to nothing


class RouterLoad:
    """Sums over the micro-batches of a step, on the device; of the tokens that predict response tokens."""

    def __init__(self, blocks: Sequence[ExpertsBlock], aux_loss: float, device: torch.device) -> None:
        self.weight = aux_loss
        self.counts = torch.zeros(len(blocks), blocks[0].gate.weight.shape[0], device=device)  # [layers, experts]
        self.differs: list[Tensor] = []  # of each micro-batch, how many choices the router would not make
        self.aux: list[Tensor] = []

    def add(self, routing: Routing, pack: Pack, tokens: int) -> Tensor | None:
        """Counts a forward pass, and returns its part of the loss of an update on so many tokens, if it has one."""
        # [layers, tokens, top-k]
        chosen, own = (torch.stack([c[pack.keep] for c in cs]) for cs in (routing.chosen, routing.own))
        self.counts += torch.stack([expert_counts(c, self.counts.shape[1]) for c in chosen])
        if pack.experts is not None:
            self.differs.append((chosen[..., None] != own[..., None, :]).all(-1).sum())
        if not self.weight:
            return None
        sample = torch.repeat_interleave(pack.responses, output_size=len(pack.keep))
        layers = [
            balance_loss(logits[pack.keep], c, sample, pack.responses).sum()
            for logits, c in zip(routing.logits, chosen, strict=True)
        ]
        loss = torch.stack(layers).mean() / max(tokens, 1)
        self.aux.append(loss.detach())
        return self.weight * loss

    def log(self, metrics: MetricLog, over_workers: Callable[[Tensor], Tensor], updates: int) -> None:
        """Logs the step, and begins a new one; all workers call it, with samples or without. `updates`: of the step."""
        differs, aux = (sum(x, self.counts.new_zeros(())) for x in (self.differs, self.aux))
        sums = over_workers(torch.cat((self.counts.flatten(), torch.stack((differs, aux)))))
        counts = sums[:-2].view_as(self.counts)
        load = counts / counts.mean(1, keepdim=True).clamp(min=1)
        metrics.log("router/load_max_ratio", float(load.max()))
        metrics.log("router/starved_frac", float((load < STARVED).float().mean()))
        if self.differs:
            metrics.log("router/mismatch", float(sums[-2] / counts.sum().clamp(min=1)))
        if self.aux:
            metrics.log("router/aux_loss", float(sums[-1]) / updates)
        self.counts, self.differs, self.aux = torch.zeros_like(self.counts), [], []
