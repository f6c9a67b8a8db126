"""The worker's side of the endpoint, with a model that says what a test wants it to say."""

import contextlib
import select
import threading
from collections.abc import Callable, Iterator
from typing import Any

from agents.families import completion, renderer, sampled
from distflow.agents.endpoint import Endpoint, EndpointCall, Violation
from distflow.agents.protocols.call import CallError
from distflow.agents.session import ConversationLimits, Ended, Session

Say = Callable[[EndpointCall], str]


class ScriptedLoop:
    """Opens sessions, and answers their calls in a thread: each with what `say` returns for it."""

    def __init__(
        self, say: Say, family: str = "qwen", limits: ConversationLimits | None = None, **options: Any
    ) -> None:
        self.family, self.say, self.limits = family, say, limits or ConversationLimits(100, 3000)
        self.renderer = renderer(family)
        self.endpoint = Endpoint("tiny", len(self.renderer.tokenizer), **options)
        self.sessions: dict[int, Session] = {}
        self.keys: dict[int, str] = {}
        self.violations: list[Violation] = []
        self.error: BaseException | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def open(self, key: int, sample_id: int | None = None) -> str:
        self.sessions[key] = Session(key if sample_id is None else sample_id, self.renderer, self.limits)
        self.keys[key] = self.endpoint.open(key, self.sessions[key].sample_id)
        return self.keys[key]

    def _run(self) -> None:
        try:
            while not self._over.is_set():
                select.select([self.endpoint.fileno()], [], [], 0.1)
                for item in self.endpoint.poll(self.keys):
                    if isinstance(item, Violation):
                        self.violations.append(item)
                        self.endpoint.close(item.key)
                    else:
                        self._answer(item)
        except BaseException as e:
            self.error = e

    def _answer(self, call: EndpointCall) -> None:
        session = self.sessions[call.key]
        try:
            if call.only_counts:
                call.count(session)
                return
            branch = call.branch(session)
        except CallError as e:
            call.refuse(e)
            return
        request = session.next_request(branch)
        if isinstance(request, Ended):
            call.ended(request.reason)
            return
        most = min(request.max_tokens, call.max_tokens or request.max_tokens)
        tokens = sampled(self.family, self.say(call))
        finished, tokens = len(tokens) <= most, tokens[:most]
        call.answer(session, branch, completion(tokens, finished, version=7, logprob=-0.5))

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self.endpoint.stop()
        if self.error is not None:
            raise self.error


@contextlib.contextmanager
def scripted(say: Say | str = "four", **options: Any) -> Iterator[ScriptedLoop]:
    loop = ScriptedLoop(say if callable(say) else lambda call: say, **options)
    loop._thread.start()
    try:
        yield loop
    finally:
        loop.close()
