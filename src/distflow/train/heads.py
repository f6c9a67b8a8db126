"""Heads, which FSDP wraps and the trainer calls: a model that returns one number per token."""

from typing import Any

from torch import Tensor, nn

from distflow.model.attention import PackedAttention
from distflow.model.source import Head
from distflow.train.logprobs import token_logprobs
from distflow.train.packing import Pack


class _WithHead(nn.Module):
    def __init__(self, lm: Any) -> None:
        super().__init__()
        self.lm = lm

    def _hidden(self, pack: Pack) -> Tensor:
        """Returns [responses, hidden], the hidden state that predicts each response token."""
        hidden = self.lm.base_model(
            input_ids=pack.tokens[None],
            position_ids=pack.positions[None],
            use_cache=False,
            distflow=PackedAttention(pack.lengths, pack.shared),
        ).last_hidden_state[0]
        # A pack without a response still passes through all layers, so that every rank takes part in the collectives.
        return hidden.index_select(0, pack.keep if len(pack.keep) else pack.keep.new_zeros(1))  # type: ignore[no-any-return]


class LogprobHead(_WithHead):
    """Computes log-prob and entropy of each token, without returning the logits."""

    def forward(self, pack: Pack, temperature: float) -> tuple[Tensor, ...]:
        hidden = self._hidden(pack)
        head = self.lm.get_output_embeddings()
        targets = pack.targets if len(pack.targets) else pack.targets.new_zeros(1)
        softcap: float | None = getattr(self.lm.config.get_text_config(), "final_logit_softcapping", None)
        return token_logprobs(hidden, head.weight, head.bias, targets, temperature, softcap)


class ValueHead(_WithHead):
    """Computes the value of the state before each token."""

    def forward(self, pack: Pack, temperature: float) -> tuple[Tensor, ...]:
        hidden = self._hidden(pack)
        return (self.lm.score(hidden).squeeze(-1).float().clone(),)  # FSDP warns of views


HEADS: dict[Head, type[_WithHead]] = {"lm": LogprobHead, "value": ValueHead}
