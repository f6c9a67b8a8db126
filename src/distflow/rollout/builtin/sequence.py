"""A sequence that is being generated: a request, and the tokens it has so far."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from distflow.model.images import Place
from distflow.rollout.builtin.history import History
from distflow.rollout.engine import Completion, Request


@dataclass(eq=False)
class Sequence:
    request: Request
    history: History | None = None  # of its sample, in which it runs
    reused: int = 0  # tokens of the prompt that its history has
    prefilled: int = 0  # tokens of the prompt that its pages have
    places: list[Place] = field(default_factory=list)  # of the images of its prompt
    ahead: int = 0  # by how much positions of new tokens are ahead of their places: images take fewer than tokens
    slot: int = -1  # its place among the running ones
    order: int = -1  # in which it was admitted
    pages: list[int] = field(default_factory=list)  # of the KV cache, while it is running
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    experts: list[NDArray[np.integer]] = field(default_factory=list)  # of the tokens computed so far, if kept
    stopped: bool = False  # by a stop token
    aborted: bool = False  # by the caller, who wants no completion
    seen: set[int] = field(default_factory=set)  # its distinct tokens, with the prompt's, for a repetition penalty

    def __post_init__(self) -> None:
        if self.request.params.repetition_penalty != 1:
            self.seen.update(self.request.prompt)

    @property
    def position(self) -> int:
        """Returns the position in the response of the next token."""
        return self.request.position + len(self.tokens)

    @property
    def length(self) -> int:
        """Tokens of the prompt and the response so far."""
        return len(self.request.prompt) + len(self.tokens)

    @property
    def max_length(self) -> int:
        return len(self.request.prompt) + self.request.room

    @property
    def history_pages(self) -> int:
        """Returns the pages of its history, which are its first ones."""
        return len(self.history.pages) if self.history else 0

    @property
    def finished(self) -> bool:
        return self.stopped or self.aborted or len(self.tokens) >= self.request.room

    def append(self, token: int, logprob: float) -> None:
        self.tokens.append(token)
        self.seen.add(token)
        self.logprobs.append(logprob)
        self.stopped = token in self.request.params.stop

    def leave_history(self, page: int) -> None:
        """Leaves the keys and values of its tokens, all but the newest, to the next request of its sample."""
        if self.history:
            kept = [*self.request.prompt, *self.tokens[:-1]][: self.history_pages * page]
            self.history.tokens, self.history.images, self.history.busy = kept, self.places, False

    def completion(self, weight_version: int) -> Completion:
        tokens, logprobs = np.array(self.tokens, np.int64), np.array(self.logprobs, np.float32)
        request = self.request
        experts = np.concatenate(self.experts) if self.experts else None
        whose = request.sample_id, tokens, logprobs, self.stopped, weight_version, request.id
        return Completion(*whose, reused=self.reused, experts=experts)
