"""Random conversations: odd text, tool calls, malformed ones, turns that are cut, histories that fork."""

import json
import random
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from agents.families import ADD, WITH_TOOLS, renderer, sampled, tokenizer, written
from distflow.agents.session import AssistantMessage, Branch, ConversationLimits, Session, TurnRequest
from distflow.errors import DataError
from distflow.rollout.engine import Completion

Message = dict[str, Any]
Reply = tuple[list[int], list[float], bool]  # tokens, log-probs, finished
_ODD = [" ", "  ", "\t", "\n", "\n\n\n", " \n", "\r\n", "\u00a0", "\u200b", "\ufeff", "a", "The result is", " 42", "é"]
_ODD += [
    "e\u0301",
    "两个",
    "🙂",
    "👩\u200d👩\u200d👧",
    "שלום",
    "\u202e",
    "{",
    '}"',
    "\\",
    "\\n",
    "<|",
    "|>",
    "\x00",
    "\x1b[",
]
_ODD += ["</s>", "[INST]", "<|im_end|>", "<|im_start|>", "<|eot_id|>", "<think>", "</think>", "<tool_call>"]


@dataclass
class Played:
    """A conversation, and an account of it that the session has no part in."""

    family: str
    session: Session
    generations: list[tuple[Branch, TurnRequest, Reply]] = field(default_factory=list)
    said: list[tuple[list[Message], bool]] = field(default_factory=list)  # between turns, and whether one was cut
    calls = errors = forks = refused = 0


Playing = Generator[TurnRequest, Reply, None]


def odd_text(rng: random.Random, most: int = 8) -> str:
    return "".join(rng.choices(_ODD, k=rng.randint(1, most)))


def play(seed: int, families: Sequence[str] = WITH_TOOLS, max_tokens: int = 1200) -> tuple[Played, Playing]:
    """Returns a conversation and the generator that plays it: it yields requests, and is sent replies."""
    rng = random.Random(seed)
    family = families[seed % len(families)]
    limits = ConversationLimits(rng.randint(1, 6), max_tokens, rng.choice([None, 20, 200]))
    played = Played(family, Session(seed, renderer(family), limits))
    style = _histories if rng.random() < 0.5 else _straight
    return played, style(rng, played)


def scripted(seed: int, family: str) -> Callable[[TurnRequest], Reply]:
    """A model that writes what models write, and what they should not."""
    rng, end = random.Random(seed + 1_000_003), tokenizer(family).eos_token_id

    def reply(request: TurnRequest) -> Reply:
        calls = [{"name": rng.choice(["add", "no_such"]), "arguments": {"a": odd_text(rng), "b": [1, {"c": None}]}}]
        kind = rng.random()
        if kind < 0.4:
            tokens = sampled(
                family, written(family, odd_text(rng) if rng.random() < 0.5 else "", calls * rng.randint(1, 3))
            )
        elif kind < 0.5:
            broken = written(family, "", calls).replace('"arguments"', rng.choice(["'x", '"', "{"]))
            tokens = sampled(family, broken.replace('"parameters"', '"'))
        elif kind < 0.6:
            tokens = [
                t for t in rng.choices(range(len(tokenizer(family))), k=12) if t != tokenizer(family).eos_token_id
            ]
        else:
            thought = f"<think>\n{odd_text(rng)}\n</think>\n\n" if rng.random() < 0.3 else ""
            tokens = sampled(family, thought + odd_text(rng))
        tokens = tokens[: request.max_tokens]
        finished = bool(tokens) and tokens[-1] == end
        if not finished and len(tokens) < request.max_tokens and rng.random() < 0.7:
            tokens, finished = [*tokens, end], True
        return tokens, [float(np.float32(-rng.random() - 0.001)) for _ in tokens], finished

    return reply


def _turn(played: Played, branch: Branch) -> Generator[TurnRequest, Reply, AssistantMessage | None]:
    request = played.session.next_request(branch)
    if not isinstance(request, TurnRequest):
        return None
    reply = yield request
    played.generations.append((branch, request, reply))
    tokens, logprobs, finished = reply
    arrays = np.array(tokens, np.int64), np.array(logprobs, np.float32)
    message = played.session.sampled(branch, Completion(0, *arrays, finished, len(played.generations)))
    played.calls += len(message.tool_calls)
    played.errors += len(message.errors)
    return message


def _answers(rng: random.Random, message: AssistantMessage) -> list[Message]:
    """What an environment says to a turn: results of its calls, what was wrong with them, or a user's words."""
    results: list[Message] = [
        {"role": "tool", "content": odd_text(rng), "tool_call_id": call.id, "name": call.name}
        for call in message.tool_calls
    ]
    results += [{"role": "tool", "content": error} for error in message.errors]
    return results or [{"role": "user", "content": odd_text(rng)}]


def _opening(rng: random.Random) -> list[Message]:
    system = [{"role": "system", "content": odd_text(rng)}] if rng.random() < 0.3 else []
    return [*system, {"role": "user", "content": odd_text(rng, 20)}]


def _straight(rng: random.Random, played: Played) -> Playing:
    """An environment that begins once and answers every turn."""
    branch = played.session.begin(_opening(rng), [ADD])
    while message := (yield from _turn(played, branch)):
        if rng.random() < 0.1:
            return
        new = _answers(rng, message)
        at = rng.randint(0, len(new)) if rng.random() < 0.3 else 0
        for part in (new[:at], new[at:]):  # one by one, or at once
            if part:
                played.session.observe(branch, part)
        if branch.ended is None:
            played.said.append((new, message.finish_reason == "length"))


def _histories(rng: random.Random, played: Played) -> Playing:
    """An agent that sends its whole history with every call, as JSON, and sometimes goes back in it."""
    history = _opening(rng)
    while True:
        known = len(played.session.branches)
        try:
            branch = played.session.match(json.loads(json.dumps(history)), [ADD])
        except DataError:  # the template does not accept what the agent made of it
            played.refused += 1
            return
        played.forks += known > 0 and len(played.session.branches) > known
        message = yield from _turn(played, branch)
        if message is None:
            return
        history.append(_as_openai(message.message(), rng))
        history += _answers(rng, message)
        ends = [i for i, m in enumerate(history) if m["role"] == "assistant"]
        if rng.random() < 0.3:
            history = history[: rng.choice(ends)]  # asks again at an earlier point
        elif rng.random() < 0.1:
            history[rng.choice(ends)] = {"role": "assistant", "content": "Rewritten."}
        elif rng.random() < 0.1:
            history = _opening(rng)


def _as_openai(message: Message, rng: random.Random) -> Message:
    calls = [
        {**c, "function": {**c["function"], "arguments": json.dumps(c["function"]["arguments"])}}
        for c in message.get("tool_calls", [])
    ]
    content: Any = message["content"].strip() if rng.random() < 0.5 else message["content"]
    if rng.random() < 0.2:
        content = [{"type": "text", "text": content}]
    return {"role": "assistant", "content": content or None, **({"tool_calls": calls} if calls else {})}
