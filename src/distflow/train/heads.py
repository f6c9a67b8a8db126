"""Heads, which FSDP wraps and the trainer calls: a model that returns one number per token."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from distflow.model.attention import PackedAttention
from distflow.model.experts import Routing, experts_blocks
from distflow.model.images import batch_of_one
from distflow.model.sequence_parallel import ALONE, SequenceParallel
from distflow.model.source import Head
from distflow.train.logprobs import token_energy, token_logprobs, top_logprobs
from distflow.train.packing import Pack, Share


class TopK(NamedTuple):
    """Asks for the `k` likeliest of the first tokens of the `vocabulary`."""

    k: int
    vocabulary: int


class _WithHead(nn.Module):
    """The ranks that divide sequences each have a share of the rows; every one returns the numbers of all tokens."""

    def __init__(self, lm: Any, sequences: SequenceParallel = ALONE) -> None:
        super().__init__()
        self.lm, self.sequences, self.experts = lm, sequences, experts_blocks(lm)
        self.routing = Routing()  # of the last forward pass

    def _hidden(self, pack: Pack, share: Share) -> Tensor:
        """Returns [responses, hidden], the hidden state that predicts each response token of this rank's share."""
        self.routing = Routing(torch.is_grad_enabled(), share.experts)
        for block in self.experts:
            block.routing = self.routing
        attention = PackedAttention(pack.lengths, pack.shared)
        hidden = self.lm.base_model(
            input_ids=share.tokens[None],
            position_ids=batch_of_one(share.positions),
            use_cache=False,
            distflow=self.sequences.attention(attention, len(pack.tokens)),
            **pack.images,
        ).last_hidden_state[0]
        # A pack without a response still passes through all layers, so that every rank takes part in the collectives.
        return hidden.index_select(0, share.keep if len(share.keep) else share.keep.new_zeros(1))  # type: ignore[no-any-return]

    def _share(self, pack: Pack) -> Share:
        return pack.share(self.sequences.rank, self.sequences.ranks)


class LogprobHead(_WithHead):
    """Computes log-prob and entropy of each token, without returning the logits."""

    def forward(
        self, pack: Pack, temperature: float, top: TopK | None = None, energy: bool = False
    ) -> tuple[Tensor, ...]:
        """Returns log-probs and entropy of the tokens, and log-probs of the pack's candidates if it has any.

        With `top`, the likeliest tokens and their log-probs instead; with `energy`, only that of each token.
        """
        share = self._share(pack)
        hidden = self._hidden(pack, share)
        head = self.lm.get_output_embeddings()
        softcap: float | None = getattr(self.lm.config.get_text_config(), "final_logit_softcapping", None)
        if top is not None:
            likeliest = top_logprobs(hidden, head.weight, head.bias, top.k, top.vocabulary, temperature, softcap)
            ids, logprobs = (self._joined(x.to(likeliest[1].dtype), share, pack) for x in likeliest)
            return ids.int(), logprobs
        targets = share.targets if len(share.targets) else share.targets.new_zeros(1)
        if energy:
            own = token_energy(hidden, head.weight, head.bias, targets, temperature, softcap)
            return self.sequences.join((own,), share.places, len(pack.targets))
        if share.candidates is None:
            outputs = token_logprobs(hidden, head.weight, head.bias, targets, temperature, softcap)
            return self.sequences.join(outputs, share.places, len(pack.targets))
        candidates = share.candidates
        if not len(candidates):
            candidates = candidates.new_zeros(1, candidates.shape[1])
        targets = torch.cat((targets[:, None], candidates), 1)
        logprobs, entropy = token_logprobs(hidden, head.weight, head.bias, targets, temperature, softcap)
        joined = self._joined(torch.cat((entropy[:, None], logprobs), 1), share, pack)
        return joined[:, 1].clone(), joined[:, 0].clone(), joined[:, 2:].clone()  # FSDP warns of views

    def _joined(self, values: Tensor, share: Share, pack: Pack) -> Tensor:
        """Joins several numbers for each token: [own responses, k] -> [responses, k]."""
        if share.places is None:
            return values
        return torch.stack(self.sequences.join(values.unbind(1), share.places, len(pack.targets)), 1)


class ValueHead(_WithHead):
    """Computes the value of the state before each token."""

    def forward(self, pack: Pack, temperature: float) -> tuple[Tensor, ...]:
        share = self._share(pack)
        values = self.lm.score(self._hidden(pack, share)).squeeze(-1).float().clone()  # FSDP warns of views
        return self.sequences.join((values,), share.places, len(pack.targets))


HEADS: dict[Head, type[_WithHead]] = {"lm": LogprobHead, "value": ValueHead}
