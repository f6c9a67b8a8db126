"""A sequence that is being generated: a request, and the tokens it has so far."""

from dataclasses import dataclass, field

import numpy as np

from distflow.engine.rollout.engine import Completion, Request


@dataclass(eq=False)
class Sequence:
    request: Request
    slot: int = -1  # its place among those that run
    order: int = -1  # in which it was admitted
    pages: list[int] = field(default_factory=list)  # of the KV cache, while it is running
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stopped: bool = False  # by a stop token
    aborted: bool = False  # by the caller, who wants no completion

    @property
    def position(self) -> int:
        """The position in the response of the token that is generated next."""
        return self.request.position + len(self.tokens)

    @property
    def length(self) -> int:
        """Tokens of the prompt and the response so far."""
        return len(self.request.prompt) + len(self.tokens)

    @property
    def max_length(self) -> int:
        return len(self.request.prompt) + self.request.room

    @property
    def finished(self) -> bool:
        return self.stopped or self.aborted or len(self.tokens) >= self.request.room

    def append(self, token: int, logprob: float) -> None:
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.stopped = token in self.request.params.stop

    def completion(self, weight_version: int) -> Completion:
        tokens, logprobs = np.array(self.tokens, np.int64), np.array(self.logprobs, np.float32)
        return Completion(self.request.sample_id, tokens, logprobs, self.stopped, weight_version, self.request.id)
