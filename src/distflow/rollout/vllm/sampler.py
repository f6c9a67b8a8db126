"""A logits processor for vLLM that samples as the built-in engine does: same noise, same log-probs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distflow.rollout.engine import Request
from distflow.rollout.sampling import sample


@dataclass(frozen=True)
class _Row:
    request: Request
    tokens: Sequence[int]  # of the response so far; vLLM appends to it
    logprobs: list[float]
    seen: set[int]  # the distinct tokens of the prompt and, once they have been sampled after, of the response


def make_sampler(logprobs: dict[int, list[float]]) -> type:
    """Returns a logits processor that samples each token, leaves vLLM no other, and adds its log-prob to `logprobs`.

    `logprobs` has a list for each id of a request.
    """
    from vllm.v1.sample.logits_processor import LogitsProcessor
    from vllm.v1.sample.logits_processor.builtin import process_dict_updates

    class Sampler(LogitsProcessor):  # type: ignore[misc]
        def __init__(self, config: Any, device: torch.device, pin_memory: bool) -> None:
            self.rows: dict[int, _Row] = {}  # of the batch

        def is_argmax_invariant(self) -> bool:
            return False

        def update_state(self, update: Any) -> None:
            process_dict_updates(self.rows, update, self._row)

        def _row(self, params: Any, prompt: Any, tokens: Sequence[int]) -> _Row:
            request: Request = params.extra_args["request"]
            return _Row(request, tokens, logprobs.setdefault(request.id, []), {*request.prompt, *tokens})

        def apply(self, logits: Tensor) -> Tensor:
            """Sets the logits [rows, vocabulary] of all tokens but the sampled ones to −∞."""
            alike: dict[Any, list[int]] = {}
            for i, row in self.rows.items():
                alike.setdefault((row.request.params.next_token, row.request.seed), []).append(i)
            for (params, seed), indices in alike.items():
                rows = [self.rows[i] for i in indices]
                index = torch.tensor(indices, device=logits.device)
                ids = np.array([row.request.sample_id for row in rows], np.int64)
                positions = np.array([row.request.position + len(row.tokens) for row in rows], np.int64)
                for row in rows:
                    row.seen.update(row.tokens[-1:])
                tokens, values = sample(logits[index], params, seed, ids, positions, [row.seen for row in rows])
                for row, value in zip(rows, values.tolist(), strict=True):
                    # A prompt that is read in parts is sampled after each part: the last sample counts.
                    row.logprobs[len(row.tokens) :] = [value]
                logits[index] = -torch.inf
                logits[index, tokens] = 0.0
            return logits

    return Sampler
