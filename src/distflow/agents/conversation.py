"""One conversation: its sample, its session, what the engine works on for it, and what its model has said so far."""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from distflow.agents.session import Branch, Session, TurnRequest
from distflow.rollout.engine import Completion

_HELD_OUT = 1 << 40  # samples of an evaluation have ids of their own, which those of training have, too


@dataclass(frozen=True)
class Sample:
    """A row to have a conversation about."""

    id: int
    environment: int  # its index
    prompt: Any  # text or messages
    row: Mapping[str, Any]
    seed: int  # of the environment's randomness; samples of a prompt share it
    steps_ahead: int = 0  # of the step in which it is trained on
    held_out: bool = False
    images: Sequence[str] = ()  # references to those of the prompt

    @property
    def key(self) -> int:
        """Returns the name of its process and its session: those of training may wait while others are held out."""
        return self.id + _HELD_OUT * self.held_out


@dataclass(frozen=True)
class SampledTurn:
    """A turn of the model as a checkpoint keeps it. `context` is a hash of the tokens before it."""

    context: str
    position: int
    tokens: list[int]
    logprobs: list[float]
    finished: bool
    weight_version: int

    @classmethod
    def of(cls, request: TurnRequest, completion: Completion) -> "SampledTurn":
        numbers = completion.tokens.tolist(), completion.logprobs.tolist()
        end = completion.finished, completion.weight_version
        return cls(_hash(request), request.position, *numbers, *end)

    def answers(self, request: TurnRequest) -> bool:
        """Returns whether this turn is the model's answer to the same tokens."""
        return (self.context, self.position) == (_hash(request), request.position)

    def completion(self, sample: int) -> Completion:
        tokens, logprobs = np.array(self.tokens, np.int64), np.array(self.logprobs, np.float32)
        return Completion(sample, tokens, logprobs, self.finished, self.weight_version)


@dataclass
class Conversation:
    """A conversation, which may be carried on in later steps.

    `turns_left`: turns that it may still make in this step; None: all that it makes. `past`: turns that it has made
    before a checkpoint, and that are said again to the environment, which starts again.
    """

    sample: Sample
    session: Session
    turns_left: int | None = None
    past: list[SampledTurn] = field(default_factory=list)
    turns: list[SampledTurn] = field(default_factory=list)
    branches: list[Branch] = field(default_factory=list)  # by the numbers that the process knows them by
    requests: dict[int, tuple[Branch, Callable[[Completion], None], Callable[[str], None]]] = field(
        default_factory=dict
    )  # that the engine works on, by id; who gets the turn, or the reason why there is none
    tool_errors: int = 0
    paused: bool = False  # its process and its agent wait for a later step
    diverged: bool = False  # its environment did not ask again what it had asked
    _since: float = field(default_factory=lambda: time.perf_counter())
    _before: float = 0.0  # seconds until then

    @property
    def seconds(self) -> float:
        """Returns how long it has taken, without pauses."""
        return self._before + (0.0 if self.paused else time.perf_counter() - self._since)

    @property
    def resting(self) -> bool:
        """Returns whether nothing happens in it until it is resumed."""
        return self.paused and not self.requests

    def pause(self) -> None:
        self._before, self.paused = self.seconds, True

    def resume(self, sample: Sample, turns: int | None) -> None:
        self.sample, self.turns_left, self.paused, self._since = sample, turns, False, time.perf_counter()

    def replayed(self, request: TurnRequest) -> Completion | None:
        """Returns what the model has said to this before, None if that is for the engine to say.

        An environment that asks something else now gets new answers from here on.
        """
        if self.past and not self.past[0].answers(request):
            self.past, self.diverged = [], True
        return self.past.pop(0).completion(self.sample.id) if self.past else None

    def as_json(self) -> list[dict[str, Any]]:
        return [asdict(turn) for turn in (*self.turns, *self.past)]


def past_turns(turns: Sequence[Mapping[str, Any]]) -> list[SampledTurn]:
    """Reads what `as_json` has written."""
    return [SampledTurn(**turn) for turn in turns]


def _hash(request: TurnRequest) -> str:
    tokens, images = np.array(request.prompt, np.int64).tobytes(), "|".join(request.images).encode()
    return hashlib.blake2b(tokens + images, digest_size=16).hexdigest()
