"""The loop of a worker that generates: conversations and the rollout engine take turns until all have ended."""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from distflow.agents.conversations import Actions, Conversations
from distflow.agents.record import ConversationRecord
from distflow.rollout.engine import Completion, Request, RolloutEngine, SamplingParams


class ReplicaGroup:
    """The ranks of a tensor-parallel replica, which generate together: the first one decides and tells the others."""

    def __init__(self, group: Any = None, first: int = 0, device: torch.device | None = None) -> None:
        self.group, self.first, self.device = group, first, device or torch.device("cpu")

    def share(self, actions: Actions | None) -> Actions:
        """Returns the actions of the first rank; all others give None."""
        if self.group is None:
            assert actions is not None
            return actions
        data = b"" if actions is None else _encode(actions)
        size = torch.tensor([len(data)], device=self.device)
        dist.broadcast(size, self.first, group=self.group)
        payload = torch.zeros(int(size), dtype=torch.uint8, device=self.device)
        if actions is not None:
            payload.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        dist.broadcast(payload, self.first, group=self.group)
        return actions if actions is not None else _decode(bytes(payload.cpu().numpy()))


class EngineUse:
    """Measures how well the engine was used: its share of time in decoding, and the tokens not computed again."""

    def __init__(self) -> None:
        self._decoding = self._waiting = 0.0
        self._reused = self._prompts = 0  # tokens
        self._since: float | None = None  # when the engine, which has something to decode, was left alone

    @contextmanager
    def decoding(self, engine: RolloutEngine) -> Iterator[None]:
        start = time.perf_counter()
        self._waiting += start - (start if self._since is None else self._since)
        yield
        self._since = time.perf_counter()
        self._decoding += self._since - start
        if not engine.has_unfinished:
            self._since = None

    def count(self, requests: Iterable[Request], completions: Iterable[Completion]) -> None:
        self._prompts += sum(len(r.prompt) for r in requests)
        self._reused += sum(c.reused for c in completions)

    @property
    def busy(self) -> float:
        """Returns the fraction of the time with something to decode in which the engine was decoding."""
        total = self._decoding + self._waiting
        return self._decoding / total if total else 1.0

    @property
    def reused(self) -> float:
        """Returns the fraction of the tokens before turns that was still in the KV cache."""
        return self._reused / self._prompts if self._prompts else 0.0


def converse(
    engine: RolloutEngine,
    conversations: Conversations | None,
    samples: Sequence[int],
    longest: int,
    concurrent: int,
    replica: ReplicaGroup | None = None,
    on_ended: Callable[[list[ConversationRecord]], list[ConversationRecord]] = lambda records: records,
) -> tuple[dict[int, ConversationRecord], EngineUse]:
    """Has all conversations, and returns their records by sample id, and how well the engine was used.

    `conversations` is None on all ranks of a replica but the first. `samples` are their ids; `on_ended` sees records as
    they end, and may return others for them.
    """
    replica, records, use = replica or ReplicaGroup(), dict[int, ConversationRecord](), EngineUse()
    wake = conversations.has_events if conversations else lambda: False
    try:
        with engine.serving(min(concurrent, len(samples)), longest):
            over = False
            while not over:
                idle = not engine.has_unfinished
                actions = replica.share(conversations.collect(idle) if conversations else None)
                over = actions.over
                engine.abort(actions.aborted)
                engine.forget([*actions.resting, *(r.sample_id for r in actions.ended)])
                dropped = set(actions.aborted)
                for request in actions.requests:
                    if request.id not in dropped:
                        engine.add_request(request)
                if actions.ended:
                    records |= {r.sample_id: r for r in on_ended(actions.ended)}
                if engine.has_unfinished:
                    with use.decoding(engine):
                        completions = engine.step(wake)
                    use.count(actions.requests, completions)
                    if conversations:
                        for completion in completions:
                            conversations.complete(completion)
    finally:
        if conversations:
            conversations.close()
    return records, use


def _encode(actions: Actions) -> bytes:
    requests = [{**asdict(r), "params": _params(r.params)} for r in actions.requests]
    ended = [r.as_json() for r in actions.ended]
    rest = {"aborted": actions.aborted, "resting": actions.resting, "over": actions.over}
    return json.dumps({"requests": requests, "ended": ended, **rest}).encode()


def _params(params: SamplingParams) -> dict[str, Any]:
    return {**asdict(params), "stop": sorted(params.stop)}


def _decode(data: bytes) -> Actions:
    message = json.loads(data)
    known: dict[str, SamplingParams] = {}  # equal ones are one object: such rows are sampled together
    requests = []
    for r in message["requests"]:
        key = json.dumps(r["params"])
        if key not in known:
            known[key] = SamplingParams(**{**r["params"], "stop": frozenset(r["params"]["stop"])})
        tuples = {name: tuple(r[name]) for name in ("prompt", "images")}
        requests.append(Request(**{**r, **tuples, "params": known[key]}))
    ended = [ConversationRecord(**r) for r in message["ended"]]
    return Actions(requests, message["aborted"], ended, message["resting"], message["over"])
