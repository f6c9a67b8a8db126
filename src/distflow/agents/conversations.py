"""The conversations of one worker's samples, all at once, against its rollout engine.

While a conversation waits for its environment or the model, the others go on. The first rank of a tensor-parallel
replica has the processes and the sessions; it tells the others which requests to make, so that all make the same calls
of the engine in the same order.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from distflow.agents.conversation import Conversation, Sample, SampledTurn, past_turns
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

    def pause(self, key: int) -> None: ...

    def resume(self, key: int) -> bool: ...

    def poll(self, timeout: float) -> list[Event]: ...

    def has_events(self) -> bool: ...

    def kill(self, key: int) -> None: ...


@dataclass(frozen=True)
class Begun:
    """A conversation of a later step at the end of this one: it goes on, or has ended already."""

    turns: list[dict[str, Any]]  # of the model so far, as a checkpoint keeps them
    conversation: Conversation | None = None  # in this process
    record: ConversationRecord | None = None

    def as_json(self) -> dict[str, Any]:
        return {"turns": self.turns, "record": self.record.as_json() if self.record else None}

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> "Begun":
        """Reads it from a checkpoint: its environment has to start again."""
        record = fields["record"]
        return cls(fields["turns"], record=ConversationRecord(**record) if record else None)


@dataclass(frozen=True)
class Ahead:
    """Samples of later steps. Each makes the `turns_ahead` of its environment now, or only its environment is started.

    One that has made its turns is paused before its environment answers: how far it comes does not depend on time.
    """

    samples: Sequence[Sample] = ()
    begins: bool = False


@dataclass
class Actions:
    """The next actions of all ranks of a replica."""

    requests: list[Request] = field(default_factory=list)
    aborted: list[int] = field(default_factory=list)  # ids of requests
    ended: list[ConversationRecord] = field(default_factory=list)
    resting: list[int] = field(default_factory=list)  # samples that make no more turns now
    over: bool = False  # all have ended

    def __bool__(self) -> bool:
        return bool(self.requests or self.aborted or self.resting or self.ended or self.over)


Reply = Callable[[Completion], None]


class Conversations:
    """Starts the conversations of one call of `converse`, answers them, and collects requests for the engine."""

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
        ahead: Ahead = Ahead(),
        begun: Mapping[int, Begun] | None = None,
    ) -> None:
        self.runtimes, self.env_pool, self.params, self.seed, self.version = runtimes, env_pool, params, seed, version
        self.endpoint, self.trainer_state = endpoint, dict(trainer_state or {})
        self.ahead, self.begun = ahead, dict(begun or {})  # by sample id: what was begun before, and for later steps
        later = ahead.samples if ahead.begins else ()
        every = range(len(runtimes))
        self._waiting = [[s for s in (*samples, *later) if s.environment == i][::-1] for i in every]
        self._upcoming = [[s for s in ahead.samples if s.environment == i and not later] for i in every]
        self._own, self._own_left = {s.id for s in samples}, len(samples)
        self._open: dict[int, Conversation] = {}  # by key
        self._of_request: dict[int, Conversation] = {}
        self._actions, self._last_request = Actions(), -1

    def has_events(self) -> bool:
        """Returns whether `collect` has something to do: the engine asks after every decoding step."""
        if self.env_pool.has_events() or self._late():
            return True
        return self.endpoint is not None and self.endpoint.has_events(self._active())

    def collect(self, wait: bool) -> Actions:
        """Returns the next actions; waits for some if the engine has nothing to do."""
        while True:
            self._start()
            events = self.env_pool.poll(self._patience() if wait and not self._actions else 0.0)
            for event in events:
                self._handle(event)
            for call in self.endpoint.poll(self._active()) if self.endpoint is not None else ():
                self._handle_call(call)
            for conversation in self._late():
                self._end_in_time(conversation)
            self._start()
            self._actions.over = self._is_over()
            if self._actions or not wait:
                actions, self._actions = self._actions, Actions()
                return actions

    def complete(self, completion: Completion) -> None:
        """Passes a turn of the model on to the process or the call that asked for it."""
        conversation = self._of_request.pop(completion.request_id, None)
        if conversation is None:
            return
        completion.check_version(self.version)
        _, reply, _ = conversation.requests.pop(completion.request_id)
        reply(completion)
        self._note_rest(conversation)

    def _is_over(self) -> bool:
        """Returns whether all have ended, and those of later steps rest, which are kept then."""
        resting = all(c.resting for c in self._open.values())
        if self._own_left or any(self._waiting) or not resting:
            return False
        for c in self._open.values():
            self.begun[c.sample.id] = Begun(c.as_json(), c)
        self._open = {}
        return True

    def _active(self) -> set[int]:
        return {key for key, c in self._open.items() if not c.paused}

    def _late(self) -> list[Conversation]:
        """Returns the conversations whose time is up, and that do not know it yet."""
        limits = [r.limits.sample_seconds for r in self.runtimes]
        if not any(limits):
            return []
        timed = [(c, limits[c.sample.environment]) for c in self._open.values() if not (c.session.over or c.paused)]
        return [c for c, limit in timed if limit and c.seconds > limit and c.turns]

    def _end_in_time(self, conversation: Conversation) -> None:
        """Makes no more turns: generations in flight are dropped, and their callers are told."""
        conversation.session.over = "sample_seconds"
        for number, (branch, _, tell) in list(conversation.requests.items()):
            self._drop(conversation, number, branch)
            branch.ended = conversation.session.over
            tell(conversation.session.over)

    def _drop(self, conversation: Conversation, number: int, branch: Branch) -> None:
        """Has the engine drop a request."""
        conversation.session.abandon(branch)
        del self._of_request[number], conversation.requests[number]
        self._actions.aborted.append(number)

    def _note_rest(self, conversation: Conversation) -> None:
        if conversation.resting:
            self._actions.resting.append(conversation.sample.id)

    def close(self) -> None:
        """Ends the processes of conversations that are not over: after an error, all of them."""
        for key in list(self._open):
            self.env_pool.kill(key)
            if self.endpoint is not None:
                self.endpoint.close(key)

    def _patience(self) -> float:
        return _IDLE_S if self.endpoint is None else _IDLE_WITH_ENDPOINT_S

    def _start(self) -> None:
        for i, (runtime, waiting) in enumerate(zip(self.runtimes, self._waiting, strict=True)):
            running = sum(c.sample.environment == i and not c.paused for c in self._open.values())
            for _ in range(min(len(waiting), runtime.concurrent - running)):
                self._begin(waiting.pop(), runtime)
            for sample in [*waiting[::-1][: runtime.warm], *self._upcoming[i]][: runtime.warm]:
                if sample.id not in self.begun:
                    self.begun[sample.id] = Begun([], self._new(sample, runtime))

    def _begin(self, sample: Sample, runtime: EnvironmentRuntime) -> None:
        """Begins a conversation, or goes on with it."""
        turns = None if sample.id in self._own else runtime.turns_ahead
        begun = self.begun.pop(sample.id, Begun([]))
        if begun.record is not None:
            self._keep_record(sample, begun.record)
            return
        conversation = begun.conversation or self._new(sample, runtime, begun.turns)
        conversation.resume(sample, turns)
        self._open[sample.key] = conversation
        if not self.env_pool.resume(sample.key):
            self._end(conversation, {}, "lost its process while it waited")

    def _new(self, sample: Sample, runtime: EnvironmentRuntime, past: Sequence[Mapping[str, Any]] = ()) -> Conversation:
        """Starts the environment of a sample, and leaves it alone until it is resumed."""
        session = Session(sample.id, runtime.renderer, runtime.limits, sample.images)
        conversation = Conversation(sample, session, past=past_turns(past))
        state = dict(self.trainer_state)
        if "global_step" in state:
            state["global_step"] += sample.steps_ahead
        prompt = with_references(sample.prompt, sample.images)
        start = {
            "row": dict(sample.row) | ({"prompt": prompt} if sample.images else {}),
            "prompt": prompt,
            "sample_id": sample.id,
            "seed": sample.seed,
            "environment": runtime.name,
            "max_turns": runtime.limits.max_turns,
            "trainer_state": state,
            "sampling": {"temperature": self.params.temperature, "max_tokens": runtime.limits.max_tokens},
            "reward_functions": list(runtime.reward_weights),
        }
        if self.endpoint is not None and runtime.needs_endpoint:
            key, url = self.endpoint.open(sample.key, sample.id), self.endpoint.session_url(sample.key)
            start["session"] = {"base_url": url, "api_key": key, "model": self.endpoint.model}
        self.env_pool.start(sample.key, sample.environment, start)
        self.env_pool.pause(sample.key)
        conversation.pause()
        return conversation

    def _handle(self, event: Event) -> None:
        conversation = self._open.get(event.key)
        if conversation is None:
            return
        if isinstance(event, Failed):
            # An agent may fail where a limit ends its conversation, because the endpoint refuses its call, or where one
            # has cut its latest turn, because its client takes that for an error: neither is a fault.
            runtime, session = self.runtimes[conversation.sample.environment], conversation.session
            limited = session.over or any(b.ended or (b.turns and not b.turns[-1].finished) for b in session.branches)
            refused = runtime.needs_endpoint and limited
            self._end(conversation, {}, None if refused else event.reason)
            return
        try:
            reply = self._operate(conversation, event)
        except (DataError, IndexError) as e:  # the fault of the environment, which it is told
            reply = {"error": str(e)}
        if reply is not None:
            self.env_pool.send(event.key, reply)

    def _operate(self, conversation: Conversation, message: Message) -> dict[str, Any] | None:
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
        self, conversation: Conversation, branch: Branch, body: Mapping[str, Any], reply: Reply
    ) -> dict[str, Any] | None:
        sampling = body.get("sampling") or {}
        most, stop = sampling.get("max_tokens"), sampling.get("stop_token_ids") or ()
        key = conversation.sample.key
        ended = self._generate(
            conversation, branch, most, stop, reply, lambda reason: self.env_pool.send(key, {"ended": reason})
        )
        return {"ended": ended.reason} if ended else None

    def _generate(
        self,
        conversation: Conversation,
        branch: Branch,
        most: int | None,
        stop: Sequence[int],
        reply: Reply,
        tell: Callable[[str], None],
    ) -> Ended | None:
        """Asks the engine for a turn. Only limits are the caller's: other sampling parameters are those of training.

        `reply` gets the turn, or `tell` the reason why there is none.
        """
        turn = conversation.session.next_request(branch)
        if isinstance(turn, Ended):
            return turn
        if past := conversation.replayed(turn):
            conversation.turns.append(SampledTurn.of(turn, past))
            reply(past)
            return None
        room = turn.max_tokens if most is None else max(1, min(turn.max_tokens, int(most)))
        params = replace(self.params, stop=self.params.stop | frozenset(stop)) if stop else self.params
        self._last_request += 1
        number = self._last_request
        sample = conversation.sample.id
        ahead = conversation.turns_left is not None
        where = turn.position, room, number, int(ahead)
        request = Request(sample, turn.prompt, params, self.seed, *where, keep=True, images=turn.images)

        def note(completion: Completion) -> None:
            conversation.turns.append(SampledTurn.of(turn, completion))
            reply(completion)

        conversation.requests[number] = branch, note, tell
        self._of_request[number] = conversation
        if conversation.turns_left is not None:
            conversation.turns_left -= 1
            if not conversation.turns_left:
                self.env_pool.pause(conversation.sample.key)
                conversation.pause()
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

        def tell(reason: str) -> None:
            self.env_pool.release(call.key)
            call.ended(reason)

        ended = self._generate(conversation, branch, call.max_tokens, call.stop_token_ids or (), reply, tell)
        if ended:
            tell(ended.reason)

    def _end(self, conversation: Conversation, done: Mapping[str, Any], failure: str | None = None) -> None:
        sample, session = conversation.sample, conversation.session
        runtime = self.runtimes[sample.environment]
        if runtime.needs_endpoint and failure is None and not session.generations:
            failure = "never called the model; it has to use the `base_url` and `api_key` it is given"
        for number, (branch, *_) in list(conversation.requests.items()):
            self._drop(conversation, number, branch)
        if self.endpoint is not None:
            self.endpoint.close(sample.key)
        del self._open[sample.key]
        began, text = any(b.turns for b in session.branches), runtime.renderer.text
        prompt, images = ((), ()) if began else (text.encode(sample.prompt, sample.images), sample.images)
        record = make_record(
            session,
            runtime.name,
            prompt,
            done,
            runtime.reward_weights,
            self.version,
            conversation.seconds,
            conversation.tool_errors,
            images,
        )
        self._keep_record(sample, replace(record, failure=failure, diverged=conversation.diverged), conversation)

    def _keep_record(
        self, sample: Sample, record: ConversationRecord, conversation: Conversation | None = None
    ) -> None:
        """Takes a record of this step for the batch, and one of a later step for that."""
        if sample.id in self._own:
            self._own_left -= 1
            self._actions.ended.append(record)
            return
        self.begun[sample.id] = Begun(conversation.as_json() if conversation else [], record=record)
        self._actions.resting.append(sample.id)
