"""A weight that is steered by how far the policy has gone from the reference model: a role for a flow of one's own."""

from typing import TYPE_CHECKING, Any

from distflow.errors import ConfigError, suggest
from distflow.flow import node

if TYPE_CHECKING:
    from distflow.data.batch import Batch
    from distflow.data.context import Context

KINDS = ("adaptive", "lagrange")


class KLControl:
    """Keeps the divergence near `target`: the weight of a step follows from the divergence of the one before.

    `adaptive` answers in proportion to the error, over a `horizon` of samples; `lagrange` is dual ascent at `rate`.
    Every worker sees the whole step and so has the same weight without asking.
    """

    def __init__(
        self,
        target: float,
        weight: float = 0.1,
        kind: str = "adaptive",
        horizon: float = 10_000.0,
        rate: float = 0.1,
    ) -> None:
        if kind not in KINDS:
            raise ConfigError(f"KLControl: unknown kind '{kind}'{suggest(kind, KINDS)}")
        self.target, self.now, self.kind, self.horizon, self.rate = target, weight, kind, horizon, rate

    def state(self) -> dict[str, float]:
        """For a checkpoint."""
        return {"weight": self.now}

    def restore(self, state: dict[str, float]) -> None:
        self.now = state["weight"]

    @node(whole_batch=True, writes="kl_weight")
    def weight(self, batch: "Batch", ctx: "Context") -> Any:
        """Of this step, for every sample; reads `divergence`, and takes it in for the next step."""
        import torch

        from distflow.algo.control import adaptive_kl, lagrange

        now, kl = self.now, float(batch["divergence"].double().mean())
        if self.kind == "adaptive":
            self.now = adaptive_kl(now, kl, self.target, self.horizon, len(batch))
        else:
            self.now = lagrange(now, kl, self.target, self.rate)
        ctx.metrics.log("actor/kl_weight", now)
        return torch.full((len(batch),), now)
