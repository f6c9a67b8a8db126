"""A controller of the KL weight, which holds the divergence from the reference model at a target."""

from typing import TYPE_CHECKING, Any

from distflow.errors import ConfigError, suggest
from distflow.flow import node
from distflow.roles.role import Role

if TYPE_CHECKING:
    from distflow.batch.batch import Batch
    from distflow.batch.context import Context

KINDS = ("adaptive", "lagrangian")


class KLControl(Role):
    """Adjusts the KL weight after every step so that the divergence stays near `target`; a role for a flow.

    `adaptive` changes it in proportion to the error, over a `horizon` of samples; `lagrangian` is dual ascent at
    `rate`. Every worker sees all samples of the step, and so computes the same weight.
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
        self.target, self.current, self.kind, self.horizon, self.rate = target, weight, kind, horizon, rate

    def state(self) -> dict[str, float]:
        return {"weight": self.current}

    def restore(self, state: dict[str, float]) -> None:
        self.current = state["weight"]

    @node(whole_batch=True, writes="kl_weight")
    def weight(self, batch: "Batch", ctx: "Context") -> Any:
        """Returns the weight of this step for every sample, and sets the weight of the next from `kl_divergence`."""
        import torch

        from distflow.algo.kl_control import adaptive_kl_weight, lagrangian_kl_weight

        weight, kl = self.current, float(batch["kl_divergence"].double().mean())
        if self.kind == "adaptive":
            self.current = adaptive_kl_weight(weight, kl, self.target, self.horizon, len(batch))
        else:
            self.current = lagrangian_kl_weight(weight, kl, self.target, self.rate)
        ctx.metrics.log("actor/kl_weight", weight)
        return torch.full((len(batch),), weight)
