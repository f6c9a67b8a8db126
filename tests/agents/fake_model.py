"""A model that says what a test has written down, for conversations of `EnvPool` without an engine."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from distflow.agents.env_pool import EnvPool
from distflow.userproc.processes import Event, Failed, Message
from limits import TimeLimit

Say = Callable[[list[dict[str, Any]]], str | None]  # the conversation so far → the next turn, None: no further turn
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


class Conversation:
    """What the worker has seen of a conversation."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.tools: list[dict[str, Any]] = []
        self.turn_rewards: list[float] = []
        self.generated: list[list[int]] = []
        self.result: dict[str, Any] | None = None
        self.failure: str | None = None

    @property
    def roles(self) -> list[str]:
        return [m["role"] for m in self.messages]


def start_message(row: Mapping[str, Any] | None = None, prompt: Any = "Go.", sample_id: int = 0) -> dict[str, Any]:
    return {"row": dict(row or {}), "prompt": prompt, "sample_id": sample_id, "seed": sample_id}


def converse(
    pool: EnvPool,
    starts: Sequence[Mapping[str, Any]],
    say: Say | Sequence[str],
    environment: int = 0,
    seconds: float = 120.0,
) -> list[Conversation]:
    """Runs conversations to their ends, all at once."""
    conversations = [Conversation() for _ in starts]
    for key, start in enumerate(starts):
        pool.start(key, environment, start)
    limit = TimeLimit(seconds)
    while any(c.result is None and c.failure is None for c in conversations):
        assert limit.left() > 0, "conversations did not end"
        for event in pool.poll(1.0):
            if event.key < len(conversations):
                answer(pool, event, conversations[event.key], say)
    return conversations


def answer(pool: EnvPool, event: Event, conversation: Conversation, say: Say | Sequence[str]) -> None:
    if isinstance(event, Failed):
        conversation.failure = event.reason
        return
    assert isinstance(event, Message)
    body = event.body
    match body["op"]:
        case "begin":
            conversation.messages += body["messages"]
            conversation.tools = body["tools"]
            pool.send(event.key, {"branch": 0})
        case "turn":
            conversation.messages += body["messages"]
            said = sum(m["role"] == "assistant" for m in conversation.messages)
            text = say(conversation.messages) if callable(say) else (say[said] if said < len(say) else None)
            pool.send(event.key, {"ended": "max_turns"} if text is None else _turn(conversation, text))
        case "generate":
            conversation.generated.append(body["token_ids"])
            text = say([]) if callable(say) else say[len(conversation.generated) - 1]
            tokens = [ord(c) for c in text or ""]
            reply = {"token_ids": tokens, "logprobs": [-1.0] * len(tokens), "finish_reason": "stop"}
            pool.send(event.key, reply)
        case "encode":
            pool.send(event.key, {"token_ids": [ord(c) for c in body["text"]]})
        case "decode":
            pool.send(event.key, {"text": "".join(map(chr, body["token_ids"]))})
        case "apply_chat_template":
            text = "".join(f"[{m['role']}]{m['content']}" for m in body["messages"])
            text += "|" * body["generation_prompt"]
            pool.send(event.key, {"token_ids": [ord(c) for c in text]})
        case "turn_reward":
            conversation.turn_rewards.append(body["reward"])
        case "done":
            conversation.result = body


def _turn(conversation: Conversation, text: str) -> dict[str, Any]:
    calls: list[dict[str, Any]] = []
    errors: list[str] = []
    for found in _CALL.findall(text):
        try:
            call = json.loads(found)
            calls.append({"id": f"call_{len(calls)}", "name": call["name"], "arguments": call["arguments"]})
        except (ValueError, KeyError) as e:
            errors.append(f"not a tool call: {e}")
    content = _CALL.sub("", text)
    conversation.messages.append({"role": "assistant", "content": content, "tool_calls": calls})
    return {
        "message": {"content": content, "tool_calls": calls, "errors": errors},
        "finish_reason": "tool_calls" if calls else "stop",
        "tokens": len(text),
        "text": text,
    }
