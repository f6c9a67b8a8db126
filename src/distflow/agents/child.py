"""The worker, as the process of a conversation sees it, and checks of what environments give to it."""

import asyncio
import inspect
import json
import numbers
import os
import socket
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from distflow.agents.image_parts import as_text
from distflow.agents.session import AssistantMessage
from distflow.agents.tool_calls import ToolCall
from distflow.errors import shown
from distflow.reward.signature import to_float
from distflow.userproc.channel import LINE_LIMIT, encode


class EnvironmentFault(Exception):  # noqa: N818 - the environment's, not ours
    """A mistake of the environment in this conversation; completes a sentence whose subject is the environment."""


@dataclass
class Outcome:
    """The end of a conversation. `reward` is for the whole conversation; rewards of its turns are a part of it."""

    reward: float | None = None
    rewards: dict[str, float] = field(default_factory=dict)  # of functions that take `environments`
    metrics: dict[str, float] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    environment: Any = None  # the user's object, for those functions


class ChildSession:
    """The worker, as an adapter sees it. `messages` is the conversation so far; `ended` says why the worker takes no
    further turn ("max_turns" or "max_tokens"), which `turn` and `generate` tell by returning None."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel, self._lines, self._pid = channel, channel.makefile("rb"), os.getpid()
        self._lock, self._runner = threading.Lock(), asyncio.Runner()  # the loop itself is made by its first use
        self._images: frozenset[str] = frozenset()  # references to those of the row
        self.messages: list[dict[str, Any]] = []
        self.prompt_messages = 0  # how many of them are the prompt
        self.ended: str | None = None

    def begin(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> int:
        """Starts a conversation with the prompt; returns the number of its branch."""
        checked = self._checked(messages)
        reply = self.request({"op": "begin", "messages": checked, "tools": list(tools)})
        self.messages, self.prompt_messages = checked, len(checked)
        branch: int = reply["branch"]
        return branch

    def turn(
        self, messages: Sequence[Mapping[str, Any]] = (), branch: int = 0, sampling: Mapping[str, Any] | None = None
    ) -> AssistantMessage | None:
        """Says `messages` to the model and returns its turn."""
        checked = self._checked(messages)
        reply = self.request({"op": "turn", "branch": branch, "messages": checked, "sampling": dict(sampling or {})})
        self.messages += checked
        if self._note_end(reply):
            return None
        said = reply["message"]
        calls = [ToolCall(c["name"], c["arguments"], c["id"]) for c in said["tool_calls"]]
        rest = reply["finish_reason"], reply["text"], reply["tokens"]
        turn = AssistantMessage(said["content"], calls, said["errors"], *rest)
        self.messages.append(turn.message())
        return turn

    def generate(self, token_ids: Sequence[int], sampling: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
        """Continues tokens: returns `token_ids`, `logprobs` and `finish_reason`."""
        tokens = [int(t) for t in token_ids]
        reply = self.request({"op": "generate", "token_ids": tokens, "sampling": dict(sampling or {})})
        return None if self._note_end(reply) else reply

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Returns the tokens of a text; `special`: it is a rendered one, whose marks of turns are special tokens."""
        tokens: list[int] = self.request({"op": "encode", "text": str(text), "special": special})["token_ids"]
        return tokens

    def decode(self, token_ids: Sequence[int], keep_special: bool = False) -> str:
        tokens = [int(t) for t in token_ids]
        text: str = self.request({"op": "decode", "token_ids": tokens, "keep_special": keep_special})["text"]
        return text

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        generation_prompt: bool = True,
    ) -> list[int]:
        """Returns the tokens of messages, and of the generation prompt if wanted, as the chat template renders them."""
        given = {"messages": self._checked(messages), "tools": list(tools), "generation_prompt": generation_prompt}
        tokens: list[int] = self.request({"op": "apply_chat_template", **given})["token_ids"]
        return tokens

    def turn_reward(self, reward: Any, branch: int = 0) -> float:
        """Records the reward of the latest turn; returns it as a number."""
        number = check_reward(reward)
        self._send({"op": "turn_reward", "branch": branch, "reward": number})
        return number

    def request(self, message: dict[str, Any]) -> dict[str, Any]:
        """Sends a request and waits for its answer; threads take turns."""
        with self._lock:
            self._send(message)
            line = self._lines.readline()
        if not line:  # the worker is done with us
            os._exit(0)
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise EnvironmentFault(str(reply["error"]))
        return reply

    def run(self, value: Any) -> Any:
        """Returns the value, or the result if it is a coroutine; all coroutines share one event loop."""
        return self._runner.run(_await(value)) if inspect.isawaitable(value) else value

    def first_message(self) -> dict[str, Any]:
        line = self._lines.readline()
        if not line:
            os._exit(0)
        start: dict[str, Any] = json.loads(line)
        images = start.get("row", {}).get("images") or ()
        self._images = frozenset(i for i in images if isinstance(i, str))
        return start

    def done(self, outcome: Outcome, error: str | None = None) -> None:
        message = {"op": "done", "reward": outcome.reward, "rewards": outcome.rewards, "metrics": outcome.metrics}
        self._send({**message, "extra": outcome.extra, "error": error})

    def _checked(self, messages: Any) -> list[dict[str, Any]]:
        """Returns messages as plain dicts, whose images are references or data URLs."""
        try:
            return as_text(check_messages(messages), self._images)
        except ValueError as e:
            raise EnvironmentFault(str(e)) from None

    def _note_end(self, reply: Mapping[str, Any]) -> bool:
        self.ended = reply.get("ended")
        return self.ended is not None

    def _send(self, message: Mapping[str, Any]) -> None:
        if os.getpid() != self._pid:  # a fork of the environment came back here
            os._exit(1)
        try:
            line = encode(message)
        except (TypeError, ValueError) as e:
            raise EnvironmentFault(f"gave something that is not text, numbers, or lists and dicts of these: {e}") from e
        if len(line) > LINE_LIMIT:
            raise EnvironmentFault(f"gave {len(line):,} bytes at once; at most {LINE_LIMIT >> 20} MiB are taken")
        self._channel.sendall(line)


async def _await(value: Any) -> Any:
    return await value


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """Returns messages as plain dicts; raises an EnvironmentFault if they are no chat."""
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise EnvironmentFault(
            f"gave {shown(messages, 60)} as messages; give a list of dicts with 'role' and 'content'"
        )
    for m in messages:
        if not isinstance(m, Mapping) or not isinstance(m.get("role"), str) or not _is_content(m.get("content")):
            raise EnvironmentFault(f"gave {shown(m, 60)} as a message; give a dict with 'role' and 'content'")
    return [dict(m) for m in messages]


def _is_content(content: Any) -> bool:
    if isinstance(content, list):
        return all(isinstance(part, dict) for part in content)
    return content is None or isinstance(content, str)


def check_reward(reward: Any) -> float:
    number = to_float(reward)
    if number is None:
        raise EnvironmentFault(f"gave {shown(reward, 60)} ({type(reward).__name__}) as a reward; give a number")
    if not abs(number) <= 3.4e38:  # rewards travel as float32
        raise EnvironmentFault(f"gave {number:g} as a reward; give a finite number")
    return number


def numbers_of(metrics: Any) -> dict[str, float]:
    """Keeps what can be averaged."""
    items = metrics.items() if isinstance(metrics, Mapping) else ()
    return {str(k): float(v) for k, v in items if isinstance(v, numbers.Real)}
