"""The conversations of one worker's samples, all at once, against its rollout engine.

While a conversation waits for its environment or the model, the others go on. The first rank of a tensor-parallel
replica has the processes and the sessions; it tells the others which requests to make, so that all make the same calls
of the engine in the same order.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from distflow.agents.image_parts import with_references
from distflow.agents.record import ConversationRecord, make_record
from distflow.agents.runtime import EnvironmentRuntime
from distflow.agents.session import AssistantMessage, Branch, Ended, Session
from distflow.errors import DataError
from distflow.rollout.engine import Completion, Request, SamplingParams
from distflow.userproc.processes import Event, Failed, Message

_IDLE_S = 1.0  # how long one waits for environments at a time, while the engine has nothing to do
_IDLE_WITH_ENDPOINT_S = 0.005  # whose calls come from another thread


class ConversationProcesses(Protocol):
    """The interface of `EnvPool` that the loop uses."""

    def start(self, key: int, environment: int, start: Mapping[str, Any]) -> None: ...

    def send(self, key: int, message: Mapping[str, Any]) -> None: ...

    def hold(self, key: int) -> None: ...

    def release(self, key: int) -> None: ...

    def poll(self, timeout: float) -> list[Event]: ...

    def has_events(self) -> bool: ...

    def kill(self, key: int) -> None: ...


@dataclass(frozen=True)
class Sample:
    """A row to have a conversation about."""

    id: int
    environment: int  # its index
    prompt: Any  # text or messages
    row: Mapping[str, Any]
    seed: int  # of the environment's randomness; samples of a prompt share it
    images: Sequence[str] = ()  # references to those of the prompt


@dataclass
class Actions:
    """The next actions of all ranks of a replica."""

    requests: list[Request] = field(default_factory=list)
    aborted: list[int] = field(default_factory=list)  # ids of requests
    ended: list[ConversationRecord] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.requests or self.aborted or self.ended)


Reply = Callable[[Completion], None]


@dataclass
class _Conversation:
    sample: Sample
    session: Session
    start: float  # when, in seconds
    branches: list[Branch] = field(default_factory=list)  # by the numbers that the process knows them by
    requests: dict[int, tuple[Branch, Reply]] = field(default_factory=dict)  # that the engine works on, by id
    tool_errors: int = 0


class Conversations:
    """Starts conversations, answers them, and collects what the engine has to do. Of one call of `converse`."""

    def __init__(
        self,
        samples: Sequence[Sample],
        runtimes: Sequence[EnvironmentRuntime],
        env_pool: ConversationProcesses,
        params: SamplingParams,
        seed: int,
        version: int,
        endpoint: Any = None,
        trainer_state: Mapping[str, Any] | None = None,
    ) -> None:
        self.runtimes, self.env_pool, self.params, self.seed, self.version = runtimes, env_pool, params, seed, version
        self.endpoint, self.trainer_state = endpoint, dict(trainer_state or {})
        self._waiting = [[s for s in samples if s.environment == i][::-1] for i in range(len(runtimes))]
        self._open: dict[int, _Conversation] = {}  # by sample id
        self._of_request: dict[int, _Conversation] = {}
        self._actions, self._last_request = Actions(), -1

    def has_events(self) -> bool:
        """Whether `collect` has something to do: the engine asks after every decoding step."""
        return self.env_pool.has_events() or (self.endpoint is not None and self.endpoint.has_events())

    def collect(self, wait: bool) -> Actions:
        """Returns the next actions; waits for some if the engine has nothing to do."""
        while True:
            self._start()
            events = self.env_pool.poll(self._patience() if wait and not self._actions else 0.0)
            for event in events:
                self._handle(event)
            for call in self.endpoint.poll() if self.endpoint is not None else ():
                self._handle_call(call)
            self._start()
            if self._actions or not wait:
                actions, self._actions = self._actions, Actions()
                return actions

    def complete(self, completion: Completion) -> None:
        """Passes a turn of the model on to the process or the call that asked for it."""
        conversation = self._of_request.pop(completion.request_id, None)
        if conversation is None:
            return
        completion.check_version(self.version)
        _, reply = conversation.requests.pop(completion.request_id)
        reply(completion)

    def close(self) -> None:
        """Ends the processes of conversations that are not over, after an error."""
        for key in list(self._open):
            self.env_pool.kill(key)
            if self.endpoint is not None:
                self.endpoint.close(key)

    def _patience(self) -> float:
        return _IDLE_S if self.endpoint is None else _IDLE_WITH_ENDPOINT_S

    def _start(self) -> None:
        for i, (runtime, waiting) in enumerate(zip(self.runtimes, self._waiting, strict=True)):
            running = sum(c.sample.environment == i for c in self._open.values())
            for _ in range(min(len(waiting), runtime.concurrent - running)):
                self._begin(waiting.pop(), runtime)

    def _begin(self, sample: Sample, runtime: EnvironmentRuntime) -> None:
        session = Session(sample.id, runtime.renderer, runtime.limits, sample.images)
        self._open[sample.id] = _Conversation(sample, session, time.perf_counter())
        start = {
            "row": dict(sample.row),
            "prompt": with_references(sample.prompt, sample.images),
            "sample_id": sample.id,
            "seed": sample.seed,
            "environment": runtime.name,
            "max_turns": runtime.limits.max_turns,
            "trainer_state": self.trainer_state,
            "sampling": {"temperature": self.params.temperature, "max_tokens": runtime.limits.max_tokens},
            "reward_functions": list(runtime.reward_weights),
        }
        if self.endpoint is not None and runtime.needs_endpoint:
            key, url = self.endpoint.open(sample.id, sample.id), self.endpoint.session_url(sample.id)
            start["session"] = {"base_url": url, "api_key": key, "model": self.endpoint.model}
        self.env_pool.start(sample.id, sample.environment, start)

    def _handle(self, event: Event) -> None:
        conversation = self._open.get(event.key)
        if conversation is None:
            return
        if isinstance(event, Failed):
            # An agent may fail where a limit ends its conversation, because the endpoint refuses its call, or where one
            # has cut its latest turn, because its client takes that for an error: neither is a fault.
            runtime, branches = self.runtimes[conversation.sample.environment], conversation.session.branches
            limited = any(b.ended or (b.turns and not b.turns[-1].finished) for b in branches)
            refused = runtime.needs_endpoint and limited
            self._end(conversation, {}, None if refused else event.reason)
            return
        try:
            reply = self._operate(conversation, event)
        except (DataError, IndexError) as e:  # the fault of the environment, which it is told
            reply = {"error": str(e)}
        if reply is not None:
            self.env_pool.send(event.key, reply)

    def _operate(self, conversation: _Conversation, message: Message) -> dict[str, Any] | None:
        """Carries out the request of a process; returns the answer, None if it comes later or never."""
        session, body, key = conversation.session, message.body, message.key
        renderer = session.renderer
        match body["op"]:
            case "begin":
                conversation.branches.append(session.begin(body["messages"], body.get("tools")))
                return {"branch": len(conversation.branches) - 1}
            case "turn":
                branch = conversation.branches[body.get("branch", 0)]
                if body["messages"] and session.observe(branch, body["messages"]):
                    return {"ended": "max_tokens"}
                return self._request(conversation, branch, body, partial(self._reply_turn, key, branch))
            case "generate":
                branch = session.match_tokens(body["token_ids"])
                return self._request(conversation, branch, body, partial(self._reply_tokens, key, branch))
            case "turn_reward":
                branch = conversation.branches[body.get("branch", 0)] if conversation.branches else session.branches[0]
                session.reward_turn(branch, float(body["reward"]))
            case "encode":
                if body.get("special"):  # an environment that renders its turns itself (OpenRLHF)
                    return {"token_ids": renderer.tokenizer.encode(body["text"], add_special_tokens=False)}
                return {"token_ids": renderer.encode_text(body["text"])}
            case "decode":
                return {"text": renderer.decode(body["token_ids"], keep_special=bool(body.get("keep_special")))}
            case "apply_chat_template":
                ask = bool(body.get("generation_prompt", True))
                return {"token_ids": renderer.prompt(body["messages"], body.get("tools") or (), ask)}
            case "done":
                self._end(conversation, body)
        return None

    def _request(
        self, conversation: _Conversation, branch: Branch, body: Mapping[str, Any], reply: Reply
    ) -> dict[str, Any] | None:
        sampling = body.get("sampling") or {}
        most, stop = sampling.get("max_tokens"), sampling.get("stop_token_ids") or ()
        ended = self._generate(conversation, branch, most, stop, reply)
        return {"ended": ended.reason} if ended else None

    def _generate(
        self, conversation: _Conversation, branch: Branch, most: int | None, stop: Sequence[int], reply: Reply
    ) -> Ended | None:
        """Asks the engine for a turn. Of sampling parameters only limits are the caller's: the rest is trained with."""
        turn = conversation.session.next_request(branch)
        if isinstance(turn, Ended):
            return turn
        room = turn.max_tokens if most is None else max(1, min(turn.max_tokens, int(most)))
        params = replace(self.params, stop=self.params.stop | frozenset(stop)) if stop else self.params
        self._last_request += 1
        number = self._last_request
        sample = conversation.sample.id
        where = turn.position, room, number
        request = Request(sample, turn.prompt, params, self.seed, *where, keep=True, images=turn.images)
        conversation.requests[number] = branch, reply
        self._of_request[number] = conversation
        self._actions.requests.append(request)
        return None

    def _sampled(self, key: int, branch: Branch, completion: Completion) -> AssistantMessage:
        conversation = self._open[key]
        said = conversation.session.sampled(branch, completion)
        conversation.tool_errors += len(said.errors)
        return said

    def _reply_turn(self, key: int, branch: Branch, completion: Completion) -> None:
        said = self._sampled(key, branch, completion)
        calls = [{"id": c.id, "name": c.name, "arguments": c.arguments} for c in said.tool_calls]
        message = {"content": said.content, "tool_calls": calls, "errors": said.errors}
        rest = {"finish_reason": said.finish_reason, "tokens": said.token_count, "text": said.text}
        self.env_pool.send(key, {"message": message, **rest})

    def _reply_tokens(self, key: int, branch: Branch, completion: Completion) -> None:
        said = self._sampled(key, branch, completion)
        tokens, logprobs = completion.tokens.tolist(), completion.logprobs.tolist()
        reason = "stop" if completion.finished else "length"
        self.env_pool.send(key, {"token_ids": tokens, "logprobs": logprobs, "finish_reason": reason, "text": said.text})

    def _handle_call(self, call: Any) -> None:
        """Answers a call of the endpoint, or ends the conversation of an agent that misuses it."""
        from distflow.agents.endpoint import Violation
        from distflow.agents.protocols.call import CallError

        conversation = self._open.get(call.key)
        if conversation is None:
            return
        if isinstance(call, Violation):
            self.env_pool.kill(call.key)
            self._end(conversation, {}, call.reason)
            return
        session = conversation.session
        try:
            if call.only_counts:
                call.count(session)
                return
            branch = call.branch(session)
        except CallError as e:
            call.refuse(e)
            return

        def reply(completion: Completion) -> None:
            self.env_pool.release(call.key)
            said = call.answer(session, branch, completion)
            conversation.tool_errors += len(said.errors)

        self.env_pool.hold(call.key)
        ended = self._generate(conversation, branch, call.max_tokens, call.stop_token_ids or (), reply)
        if ended:
            self.env_pool.release(call.key)
            call.ended(ended.reason)

    def _end(self, conversation: _Conversation, done: Mapping[str, Any], failure: str | None = None) -> None:
        sample, session = conversation.sample, conversation.session
        runtime = self.runtimes[sample.environment]
        if runtime.needs_endpoint and failure is None and not session.generations:
            failure = "never called the model; it has to use the `base_url` and `api_key` it is given"
        for number, (branch, _) in conversation.requests.items():
            session.abandon(branch)
            del self._of_request[number]
            self._actions.aborted.append(number)
        if self.endpoint is not None:
            self.endpoint.close(sample.id)
        del self._open[sample.id]
        seconds = time.perf_counter() - conversation.start
        began, text = any(b.turns for b in session.branches), runtime.renderer.text
        prompt, images = ((), ()) if began else (text.encode(sample.prompt, sample.images), sample.images)
        record = make_record(
            session,
            runtime.name,
            prompt,
            done,
            runtime.reward_weights,
            self.version,
            seconds,
            conversation.tool_errors,
            images,
        )
        self._actions.ended.append(replace(record, failure=failure))
