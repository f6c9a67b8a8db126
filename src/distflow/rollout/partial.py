"""Responses that are begun in one step and carried on in a later one, with other weights.

What is left of a step's slots goes to prompts of later steps. When the step's own responses are complete, the others
are interrupted. Each is carried on from its tokens so far, which keep the log-probs of the weights that made them.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from distflow.batch.batch import Batch, Column, Ragged
from distflow.batch.context import Partial
from distflow.rollout.engine import Completion, Request, RolloutEngine

_COMPLETE = "complete"


class Begun:
    """The responses of one rank that were begun before this step, by sample id."""

    def __init__(self, partial: Partial, as_read: Callable[[Tensor], Tensor] = lambda sampled: sampled) -> None:
        self.partial, self.as_read = partial, as_read
        self.responses: dict[int, Completion] = {}  # `weight_version` is that of the first token
        self.complete: dict[int, Completion] = {}  # nothing is left to generate of these
        batch = partial.begun
        if batch is not None:
            for i, response in zip(batch.ids.tolist(), _responses(batch), strict=True):
                self.responses[i] = response
            done = batch[_COMPLETE]
            self.complete = {i: r for (i, r), c in zip(self.responses.items(), done.tolist(), strict=True) if c}

    def rest(self, request: Request) -> Request:
        """Returns the request for what is left of a response."""
        begun = self.responses.get(request.sample_id)
        if begun is None:
            return request
        tokens = self.as_read(torch.from_numpy(begun.tokens)).tolist()
        return replace(request, prompt=(*request.prompt, *tokens), position=len(tokens))

    def joined(self, completion: Completion) -> Completion:
        """Returns a response with what was generated of it before."""
        begun = self.responses.get(completion.sample_id)
        if begun is None:
            return completion
        return replace(
            completion,
            tokens=np.concatenate([begun.tokens, completion.tokens]),
            logprobs=np.concatenate([begun.logprobs, completion.logprobs]),
            versions=np.concatenate([begun.token_versions, completion.token_versions]),
            weight_version=begun.weight_version,
        )

    def carry(self, complete: Mapping[int, Completion], interrupted: Iterable[Completion]) -> None:
        """Keeps responses of later steps that have at least one token, complete or not."""
        responses = {c.sample_id: c for c in map(self.joined, interrupted) if len(c.tokens)}
        done = self.complete | dict(complete)
        responses |= done
        ahead = self.partial.ahead
        places = np.flatnonzero(np.isin(ahead.ids, list(responses)))
        ordered = [responses[i] for i in ahead.ids[places].tolist()]
        columns: dict[str, Column] = {
            "tokens": _ragged([c.tokens for c in ordered], np.int64),
            "logprobs": _ragged([c.logprobs for c in ordered], np.float32),
            "finished": torch.tensor([c.finished for c in ordered], dtype=torch.bool),
            "versions": _ragged([c.token_versions for c in ordered], np.int64),
            _COMPLETE: torch.tensor([c.sample_id in done for c in ordered], dtype=torch.bool),
        }
        self.partial.carry(Batch(ahead.ids[places], ahead.groups[places], columns))


def complete_with_others(
    engine: RolloutEngine,
    requests: list[Request],
    others: list[Request],
    begun: Begun,
    version: int,
    progress: Callable[[Mapping[int, Completion]], None],
) -> dict[int, Completion]:
    """Returns the completion of each of `requests`, by sample id; free slots go to `others`.

    Where the others are interrupted depends on the tokens of the requests alone: nothing here depends on time.
    """
    wanted = {r.sample_id for r in requests}
    completions = {i: c for i, c in begun.complete.items() if i in wanted}
    others_complete: dict[int, Completion] = {}
    if completions:
        progress(completions)
    for request in (*requests, *(replace(r, priority=1) for r in others)):
        if request.sample_id not in begun.complete:
            engine.add_request(begun.rest(request))
    while len(completions) < len(wanted):
        for completion in engine.step():
            completion.check_version(version)
            own = completions if completion.sample_id in wanted else others_complete
            own[completion.sample_id] = begun.joined(completion)
        progress(completions)
    begun.carry(others_complete, engine.interrupt())
    return completions


def carried_tokens(partial: Partial, batch: Batch) -> int:
    """Returns how many tokens of the responses to a batch were generated in earlier steps."""
    if partial.begun is None:
        return 0
    return int(partial.begun["tokens"].lengths[np.isin(partial.begun.ids, batch.ids)].sum())


def _responses(batch: Batch) -> list[Completion]:
    tokens, logprobs, finished, versions = (batch[f] for f in ("tokens", "logprobs", "finished", "versions"))
    return [
        Completion(i, t.numpy(), p.numpy(), f, int(v[0]), versions=v.numpy())
        for i, t, p, f, v in zip(batch.ids.tolist(), tokens, logprobs, finished.tolist(), versions, strict=True)
    ]


def _ragged(arrays: list[NDArray[Any]], dtype: type) -> Ragged:
    lengths = np.array([len(a) for a in arrays], np.int64)
    return Ragged.packed(torch.from_numpy(np.concatenate([np.empty(0, dtype), *arrays])), lengths)
