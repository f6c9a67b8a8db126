"""The endpoint of a worker: agents that speak OpenAI's or Anthropic's APIs call it, which becomes the sample's record.

A session is opened for each sample, with a key of its own; only that key is served. The HTTP server runs in a thread
and never touches a session: calls wait in a queue until the worker's loop takes them, and are answered by the loop.
"""

import asyncio
import contextlib
import secrets
import socket
import threading
from collections import OrderedDict, deque
from collections.abc import Container, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from distflow.agents.endpoint_server import LOOPBACK, Reply, ServerThread
from distflow.agents.protocols.call import (
    NOT_STORED,
    Api,
    CallBody,
    CallError,
    Json,
    Sampled,
    cut_at_stop,
    parse_body,
    warn_once,
)
from distflow.agents.protocols.messages import COUNT_TOKENS
from distflow.agents.session import AssistantMessage, Branch, Session
from distflow.errors import DataError

if TYPE_CHECKING:
    from distflow.rollout.engine import Completion

MAX_CALLS = 8  # of one session that wait at once
MAX_REFUSED = 64  # calls of a session, before its agent is taken for broken
_REMEMBERED = 1 << 14  # keys of sessions that have ended


@dataclass(frozen=True)
class Violation:
    """A session whose agent misuses the endpoint; `reason` completes a sentence whose subject is the agent."""

    key: int
    reason: str


@dataclass(eq=False)
class _Open:
    """A session that is being served. The counts are the server thread's."""

    key: int
    sample_id: int
    api_key: str
    waiting: int = 0
    refused: int = 0
    calls: "set[EndpointCall]" = field(default_factory=set)  # that the loop owes an answer
    replies: "dict[str, _Held]" = field(default_factory=dict)  # the loop's, by id


@dataclass(frozen=True)
class _Held:
    """A history up to a reply that a later call may continue."""

    messages: list[Json]
    system: Json | None
    tools: list[Json] | None


class EndpointCall:
    """A call that waits for the model. The worker's loop answers it exactly once."""

    def __init__(self, endpoint: "Endpoint", session: _Open, body: CallBody, reply: "asyncio.Future[Reply]") -> None:
        self.key, self.body, self.max_tokens = session.key, body, body.max_tokens
        self.stop_token_ids = body.stop_token_ids
        self._endpoint, self._open, self._reply = endpoint, session, reply

    def branch(self, session: Session) -> Branch:
        """Returns the branch to continue, or a new one; raises CallError if the history cannot be rendered."""
        with _as_call_error():
            if self.body.messages is not None:
                return session.match(*self._history())
            tokens = self.body.token_ids
            return session.match_tokens(_tokens_of(session, self.body.text or "") if tokens is None else tokens)

    @property
    def only_counts(self) -> bool:
        """Returns whether the call asks for the length of its history, and for nothing else."""
        return self.body.api is COUNT_TOKENS

    def count(self, session: Session) -> None:
        """Replies with the number of tokens that its history would have before the model's turn."""
        with _as_call_error():
            self._send(Reply(body={"input_tokens": session.count(*self._history())}))

    def answer(self, session: Session, branch: Branch, completion: "Completion") -> AssistantMessage:
        """Records what was generated for the call in the session, up to a stop string of the call, and replies."""
        body, prompt, decode = self.body, [*branch.prompt, *branch.tokens], session.renderer.decode
        kept, stopped = cut_at_stop(completion.tokens.tolist(), body.stop, decode)
        tokens, logprobs = completion.tokens[:kept], completion.logprobs[:kept]
        finished = completion.finished and not stopped
        message = session.sampled(branch, replace(completion, tokens=tokens, logprobs=logprobs, finished=finished))
        # A malformed call is shown to the agent as text. The history it sends next has what was shown to it.
        content, text = (message.content if message.tool_calls else message.text), message.text
        stop = min((s for s in body.stop if s in text), key=text.index, default=None)
        for s in body.stop:
            content, text = content.partition(s)[0], text.partition(s)[0]
        branch.messages[-1]["content"] = content
        reason = "length" if not (finished or stopped) else "tool_calls" if message.tool_calls else "stop"
        calls = tuple((c.id, c.name, c.arguments) for c in message.tool_calls)
        numbers = tokens.tolist(), logprobs.tolist(), completion.weight_version
        reply = body.api.reply(body, Sampled(content, calls, text, reason, prompt, *numbers, stop), decode)
        if body.store:
            held = self._held()
            self._open.replies[reply["id"]] = replace(held, messages=[*held.messages, branch.messages[-1]])
        self._send(Reply(events=body.api.events(body, reply)) if body.stream else Reply(body=reply))
        return message

    def _history(self) -> tuple[list[Json], list[Json] | None]:
        """Returns the messages to continue, and the tools."""
        held = self._held()
        return [*([held.system] if held.system else []), *held.messages], held.tools

    def _held(self) -> _Held:
        """Joins what the call says to the reply that it continues."""
        body = self.body
        before = _Held([], None, None)
        if body.previous is not None:
            if body.previous not in self._open.replies:
                what = f"{body.previous:.60} is no reply of this session that was stored; send the whole history"
                raise CallError(404, what, None, NOT_STORED)
            before = self._open.replies[body.previous]
        system, tools = (before.system, before.tools) if body.inherits else (None, None)
        return _Held([*before.messages, *(body.messages or ())], body.system or system, body.tools or tools)

    def ended(self, reason: str) -> None:
        """Replies that the sample is over: a limit of its session is reached. Clients do not try that again."""
        limit = "rollout.max_tokens" if reason == "max_tokens" else f"environment.{reason}"
        code = "context_length_exceeded" if reason == "max_tokens" else reason
        message = f"sample {self._open.sample_id} has reached its limit {limit}: there are no more turns for it"
        self.refuse(CallError(400, message, None, code))

    def refuse(self, error: CallError) -> None:
        self._endpoint._count_refused(self._open, str(error))
        self._send(Reply(error=error))

    def _send(self, reply: Reply) -> None:
        with self._endpoint._lock:
            self._open.calls.discard(self)
        self._endpoint._server.resolve(self._reply, reply)


class Endpoint:
    """Serves the sessions of one worker, for as long as the worker lives; a fork of the worker does not serve.

    `host` is loopback unless the config asks for another address, on which every client that has a key is served.
    """

    def __init__(self, model: str, vocabulary: int, max_calls: int = MAX_CALLS, host: str = LOOPBACK) -> None:
        self.model, self.vocabulary, self.max_calls = model, vocabulary, max_calls
        self.counts = {"calls": 0, "refused": 0, "unauthorized": 0, "late": 0}  # since the start
        self._lock = threading.Lock()
        self._open: dict[str, _Open] = {}  # by the key that the agent has
        self._keys: dict[int, _Open] = {}
        self._ended: OrderedDict[str, int] = OrderedDict()  # sample ids by the keys of sessions that are over
        self._queue: deque[EndpointCall | Violation] = deque()
        self._readable, self._writable = socket.socketpair()
        self._readable.setblocking(False)
        self._writable.setblocking(False)
        self._server = ServerThread(self, host)

    @property
    def url(self) -> str:
        return self._server.url

    @property
    def base_url(self) -> str:
        """Returns the base URL for an OpenAI client, used with the key of a session; Anthropic's adds /v1 itself."""
        return f"{self.url}/v1"

    def session_url(self, key: int) -> str:
        """Returns the base URL of a session: there, no other session's key is served.

        A key in the place of the session's number (`…/s/sk-…/v1`) serves agents that send a key of their own.
        """
        return f"{self.url}/s/{key}/v1"

    def open(self, key: int, sample_id: int) -> str:
        """Begins to serve a session; returns the key that its agent must send."""
        session = _Open(key, sample_id, f"sk-{secrets.token_hex(24)}")
        with self._lock:
            self._open[session.api_key] = self._keys[key] = session
        return session.api_key

    def close(self, key: int) -> None:
        """Ends a session: calls that wait are refused, and so are all later ones."""
        with self._lock:
            session = self._keys.pop(key, None)
            if session is None:
                return
            del self._open[session.api_key]
            self._ended[session.api_key] = session.sample_id
            while len(self._ended) > _REMEMBERED:
                self._ended.popitem(last=False)
            calls = list(session.calls)
            session.calls.clear()
            self._queue = deque(item for item in self._queue if item.key != key)
        for call in calls:
            self._server.resolve(call._reply, Reply(error=_late(session.sample_id)))

    def fileno(self) -> int:
        """Returns a file descriptor that is readable when `poll` may have something."""
        return self._readable.fileno()

    def has_events(self, keys: Container[int]) -> bool:
        with self._lock:
            return any(item.key in keys for item in self._queue)

    def poll(self, keys: Container[int]) -> list[EndpointCall | Violation]:
        """Returns the calls of these sessions that have arrived since the last time; those of others wait."""
        with contextlib.suppress(BlockingIOError):
            while self._readable.recv(4096):
                pass
        with self._lock:
            items = [item for item in self._queue if item.key in keys]
            self._queue = deque(item for item in self._queue if item.key not in keys)
        return items

    def stop(self) -> None:
        """Ends the server and its thread; sessions that are open are over."""
        for key in list(self._keys):
            self.close(key)
        if self._server.stop():
            self._readable.close()
            self._writable.close()

    # -------------------------------------------------------------------------------- called by the server's thread

    def authorize(self, place: str | None, api_key: str | None) -> _Open:
        """Returns the session that a call belongs to, by the key it came with. `place`: what its URL has after /s/."""
        if place is not None and not place.isdecimal():
            place, api_key = None, place
        with self._lock:
            session = self._open.get(api_key or "")
            if session is not None and place in (None, str(session.key)):
                return session
            ended = self._ended.get(api_key or "")
            owner = self._keys.get(int(place)) if place is not None and len(place) < 20 else None
            self.counts["unauthorized" if ended is None else "late"] += 1
        if ended is not None:
            warn_once(f"a call came for sample {ended} after its conversation had ended; it was refused")
            raise _late(ended)
        whose = f"sample {session.sample_id}" if session is not None else "no session"
        if owner is not None:
            warn_once(f"a call to the session of sample {owner.sample_id} had the key of {whose}; it was refused")
        where = f"that of sample {owner.sample_id}" if owner is not None else "of a session"
        message = f"the key is not {where}; use the one that the agent was given"
        raise CallError(401 if session is None else 403, message, None, "invalid_api_key")

    def enter(self, session: _Open) -> None:
        """Admits a call of a session, which then reads its body and waits."""
        if session.waiting >= self.max_calls:
            error = f"sample {session.sample_id} has {self.max_calls} calls waiting already; wait for a reply"
            self._count_refused(session, error)
            raise CallError(429, error, None, "rate_limit_exceeded")
        session.waiting += 1

    def leave(self, session: _Open) -> None:
        session.waiting -= 1

    def submit(self, session: _Open, api: Api, raw: bytes) -> "asyncio.Future[Reply]":
        """Queues a call for the loop; the future gets its reply."""
        try:
            body = parse_body(api, raw, self.vocabulary)
        except CallError as e:
            self._count_refused(session, str(e))
            raise
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        call = EndpointCall(self, session, body, future)
        with self._lock:
            if session.api_key not in self._open:
                self.counts["late"] += 1
                raise _late(session.sample_id)
            self.counts["calls"] += 1
            session.calls.add(call)
            self._queue.append(call)
        self._wake()
        return future

    def models(self) -> Json:
        return {"object": "list", "data": [{"id": self.model, "object": "model", "created": 0, "owned_by": "distflow"}]}

    def _count_refused(self, session: _Open, why: str) -> None:
        with self._lock:
            self.counts["refused"] += 1
            session.refused += 1
            if session.refused != MAX_REFUSED or session.api_key not in self._open:
                return
            reason = f"had {MAX_REFUSED} calls of the endpoint refused, the last one because: {why}"
            self._queue.append(Violation(session.key, reason))
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # it is full, and so readable anyway; or the endpoint has stopped
            self._writable.send(b"\0")


@contextlib.contextmanager
def _as_call_error() -> Iterator[None]:
    """Refuses the call if its history cannot be rendered."""
    try:
        yield
    except DataError as e:
        too_long = "the longest allowed" in str(e)
        raise CallError(400, str(e), None, "context_length_exceeded" if too_long else None) from None


def _late(sample_id: int) -> CallError:
    return CallError(410, f"sample {sample_id} has ended: its session is closed", None, "session_ended")


def _tokens_of(session: Session, text: str) -> list[int]:
    """Encodes a history given as text; where it goes on from a branch, that branch's tokens are used as they are."""
    renderer = session.renderer
    starts = [[*b.prompt, *b.tokens] for b in session.branches if b.turns and not b.in_flight]
    known = sorted(((renderer.decode(t, keep_special=True), t) for t in starts), key=lambda pair: -len(pair[0]))
    for start, tokens in known:
        if text.startswith(start):
            rest = text[len(start) :]
            return tokens + (renderer.encode_text(rest) if rest else [])
    return renderer.text.encode_rendered(text)  # the agent writes the marks of turns itself
