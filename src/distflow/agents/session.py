"""The token record of one sample: what the model sampled, what the environment said, in the order the model saw it.

Sampled tokens are appended as they are and never rendered again. A session holds branches: one for each history that
an agent made the model continue. A branch that goes on where an earlier one was shares its beginning.
"""

import copy
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from distflow.agents.image_parts import references_of, without_references
from distflow.agents.message import Message, as_chat, check_tools, count_common, same
from distflow.agents.tool_calls import ToolCall, Tools
from distflow.errors import DataError

if TYPE_CHECKING:
    from distflow.agents.rendering import Renderer
    from distflow.model.images import Place
    from distflow.rollout.engine import Completion


@dataclass(frozen=True)
class ConversationLimits:
    max_turns: int  # generations of a session, in all branches
    max_tokens: int  # response tokens of a branch: sampled ones and the environment's
    turn_tokens: int | None = None  # sampled tokens of one turn
    sample_tokens: int | None = None  # sampled tokens of a session, in all branches
    sample_seconds: float | None = None  # of a conversation, which its loop measures


@dataclass
class Turn:
    """One generation of the model within a branch."""

    start: int  # in `branch.tokens`
    length: int
    finished: bool  # by a stop token
    weight_version: int
    messages: int  # of the branch, up to this turn's
    reward: float | None = None  # of the turn, if the environment gave one


@dataclass
class Branch:
    """One history. `tokens`, `mask` and `logprobs` are parallel, and come after the prompt.

    A fork has the turns that it shares with the branch that it left, before its own.
    """

    prompt: list[int]  # before the first sampled token
    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)
    images: list["Place"] = field(default_factory=list)  # in prompt and tokens, which are counted as one
    tokens: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)  # true: sampled by the model
    logprobs: list[float] = field(default_factory=list)  # 0 where not sampled
    versions: list[int] = field(default_factory=list)  # of the weights that sampled each; −1 where not sampled
    turns: list[Turn] = field(default_factory=list)
    ended: str | None = None  # why nothing more can be generated here
    in_flight: int = 0  # tokens that a generation may have which was requested and has not come yet
    inherited: int = 0  # turns of the branch that it left
    first: int = 0  # which generation of the session was the first here
    last: int = 0  # and which was the latest
    position: int = 0  # of the first token of the generation in flight

    @property
    def own_turns(self) -> list[Turn]:
        return self.turns[self.inherited :]

    @property
    def end(self) -> int:
        """Returns how many tokens count: nothing is learned from messages after the last turn."""
        return self.turns[-1].start + self.turns[-1].length if self.turns else 0

    def transcript(self) -> list[Message]:
        """Returns the messages for people: turns with their tokens and rewards, others with those up to the next turn.

        Messages that the model never saw, after the last turn, have no count.
        """
        messages = [without_references(m) for m in self.messages]
        end = -len(self.prompt)  # of the tokens that are counted so far
        for turn in self.turns:
            if turn.messages > 1:
                messages[turn.messages - 2]["tokens"] = turn.start - end
            said = messages[turn.messages - 1]
            said["tokens"], end = turn.length, turn.start + turn.length
            said |= {} if turn.finished else {"cut": True}
            said |= {} if turn.reward is None else {"reward": turn.reward}
        return messages


@dataclass(frozen=True)
class TurnRequest:
    prompt: tuple[int, ...]  # as the model reads it
    position: int  # for the sampling noise: no other token of the sample has the same
    max_tokens: int
    images: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ended:
    reason: str  # a limit: max_turns, max_tokens, sample_tokens, sample_seconds


@dataclass(frozen=True)
class AssistantMessage:
    content: str  # without tool calls
    tool_calls: list[ToolCall]
    errors: list[str]  # of malformed calls, to tell the model
    finish_reason: str  # stop, length, tool_calls
    text: str  # all that the model wrote
    token_count: int

    def message(self) -> Message:
        """Returns the turn as a chat message."""
        calls = [call.message() for call in self.tool_calls]
        return {"role": "assistant", "content": self.content, **({"tool_calls": calls} if calls else {})}


class Session:
    """The branches of one sample."""

    def __init__(
        self, sample_id: int, renderer: "Renderer", limits: ConversationLimits, images: Collection[str] = ()
    ) -> None:
        self.sample_id, self.renderer, self.limits = sample_id, renderer, limits
        self.images = images  # references to those of the sample's row
        self.branches: list[Branch] = []
        self.generations = 0
        self.over: str | None = None  # the budget that has ended all of it
        self._calls = 0  # tool calls so far, for their ids
        self._position = 0  # of the next token that is not asked for yet

    def begin(self, messages: Sequence[Message] | str, tools: Tools | None = None) -> Branch:
        """Starts a branch with a prompt; a text is the message of a user."""
        chat = as_chat([{"role": "user", "content": messages}] if isinstance(messages, str) else messages, self.images)
        check_tools(tools or ())
        prompt, messages, images = self._prompt(chat, tools or ())
        branch = Branch(prompt, messages, list(tools or ()), images)
        self.branches.append(branch)
        return branch

    def next_request(self, branch: Branch) -> TurnRequest | Ended:
        """Returns what the engine should generate for this branch now."""
        self._check_idle(branch)
        room = self.limits.max_tokens - len(branch.tokens)
        left = room if self.limits.sample_tokens is None else self.limits.sample_tokens - self._spent()
        if self.over is None and left < 1:
            self.over = "sample_tokens"
        branch.ended = branch.ended or self.over
        if branch.ended is None and self.generations >= self.limits.max_turns:
            branch.ended = "max_turns"
        if branch.ended is None and room < 1:
            branch.ended = "max_tokens"
        if branch.ended is not None:
            return Ended(branch.ended)
        most = min(room, left, self.limits.turn_tokens or room)
        # As in a single turn, a token's position is its index in the response, as long as there is one branch.
        branch.position = max(self._position, len(branch.tokens))
        branch.in_flight, self._position = most, branch.position + most
        self.generations += 1
        branch.first, branch.last = branch.first or self.generations, self.generations
        read = self.renderer.as_read(branch.tokens, branch.mask)
        images = tuple(place.reference for place in branch.images)
        return TurnRequest((*branch.prompt, *read), branch.position, most, images)

    def sampled(self, branch: Branch, completion: "Completion") -> AssistantMessage:
        """Appends what the engine generated, exactly, and reads it."""
        tokens, finished = completion.tokens.tolist(), completion.finished
        self._append(branch, tokens, completion.logprobs.tolist(), completion.weight_version)
        branch.in_flight = 0
        if not any(b.in_flight for b in self.branches):
            self._position = branch.position + len(tokens)  # give back what was not used
        text, content, calls, errors = self.renderer.read(tokens, branch.tools)
        calls = [replace(call, id=f"call{self._calls + i:05d}") for i, call in enumerate(calls)]
        self._calls += len(calls)
        reason = "length" if not finished else "tool_calls" if calls else "stop"
        message = AssistantMessage(content, calls, errors, reason, text, len(tokens))
        branch.messages.append(message.message())
        start = len(branch.tokens) - len(tokens)
        branch.turns.append(Turn(start, len(tokens), finished, completion.weight_version, len(branch.messages)))
        return message

    def abandon(self, branch: Branch) -> None:
        """Forgets the generation in flight: it was aborted, and its positions are not used again."""
        branch.in_flight = 0

    def observe(self, branch: Branch, messages: Sequence[Message]) -> Ended | None:
        """Appends messages of the environment and the next generation prompt, as tokens that are not trained on.

        Several calls between two turns are rendered as one: some templates write adjacent results as a block.
        """
        self._check_idle(branch)
        new = as_chat(messages, self.images)
        if not branch.turns:  # nothing was sampled: the prompt grows
            branch.prompt, branch.messages, branch.images = self._prompt([*branch.messages, *new], branch.tools)
            return None
        turn = branch.turns[-1]
        if self.renderer.text.fewest_tokens(new) > self.limits.max_tokens:  # to tokenize 100 MB takes minutes
            branch.messages += new
            return self._end(branch)
        branch.messages += new
        self._cut(branch, turn.start + turn.length)
        new, last = branch.messages[turn.messages :], branch.tokens[turn.start :]
        said = branch.messages[turn.messages - 1]
        tokens = self.renderer.continuation(said, new, branch.tools, last, turn.finished)
        return self._say(branch, tokens, references_of(new))

    def match(self, messages: Sequence[Message], tools: Tools | None = None) -> Branch:
        """Returns the branch to generate from for a whole history, as an agent sends it with each call.

        If a branch's messages are the beginning of the history, it goes on there; else a new branch begins at the
        end of the last turn that the history shares with any; else with a prompt. Two messages are the same if they
        have the same role, content and tool calls (names and arguments; ids may change). White space around the
        content of the assistant's messages is not compared, because agents strip it; nor is reasoning that they have
        left out: as with templates that strip it, the tokens that were sampled stay.
        """
        chat = as_chat(messages, self.images)
        check_tools(tools or ())
        known = [(b, count_common(b.messages, chat)) for b in self.branches if same(b.tools, list(tools or ()))]
        for branch, n in sorted(known, key=lambda pair: pair[1], reverse=True):
            if n == len(branch.messages) and not branch.in_flight and chat[-1]["role"] != "assistant":
                if n < len(chat):
                    self.observe(branch, chat[n:])
                return branch
        cuts = [(turn.messages, b, i) for b, n in known for i, turn in enumerate(b.turns) if turn.messages <= n]
        if not cuts or chat[-1]["role"] == "assistant":
            return self.begin(chat, tools)
        count, origin, index = max(cuts, key=lambda entry: entry[0])
        branch = self._fork(origin, index)
        self.observe(branch, chat[count:])
        return branch

    def count(self, messages: Sequence[Message], tools: Tools | None = None) -> int:
        """Returns how many tokens would be before the model's turn if it continued this history; changes nothing."""
        trial = Session(self.sample_id, self.renderer, replace(self.limits, max_tokens=sys.maxsize), self.images)
        trial.branches = copy.deepcopy(self.branches)
        branch = trial.match(messages, tools)
        return len(branch.prompt) + len(branch.tokens)

    def match_tokens(self, token_ids: Sequence[int]) -> Branch:
        """Returns the branch to generate from for a history of tokens; what it adds to the branch is not trained on."""
        tokens = self.renderer.check_tokens(token_ids)
        self.renderer.check_no_images(tokens)
        cuts: list[tuple[int, Branch, int]] = []
        for branch in self.branches:
            whole = branch.prompt + branch.tokens
            if tokens[: len(whole)] == whole and not branch.in_flight:
                cuts.append((len(whole), branch, -1))
            for i, turn in enumerate(branch.turns):
                end = len(branch.prompt) + turn.start + turn.length
                if tokens[:end] == whole[:end]:
                    cuts.append((end, branch, i))
        if not cuts:
            branch = Branch(self.renderer.text.check_length(tokens), [])
            self.branches.append(branch)
            return branch
        end, branch, index = max(cuts, key=lambda cut: (cut[0], cut[2] < 0))
        if index >= 0:
            branch = self._fork(branch, index)
        if rest := tokens[end:]:
            branch.messages.append({"role": "environment", "content": self.renderer.decode(rest, keep_special=True)})
            if branch.turns:
                self._say(branch, rest)
            else:
                branch.prompt = self.renderer.text.check_length(tokens)
        return branch

    def reward_turn(self, branch: Branch, reward: float) -> None:
        """Gives the latest turn of a branch a reward of its own."""
        if not branch.turns:
            raise DataError(f"sample {self.sample_id}: a reward came for a turn before the first one was generated")
        branch.turns[-1].reward = reward

    def sampled_branches(self) -> list[Branch]:
        """Returns the branches in which the model was sampled, in the order of their first generations."""
        return sorted((b for b in self.branches if b.own_turns), key=lambda b: b.first)

    def _prompt(self, messages: list[Message], tools: Tools) -> tuple[list[int], list[Message], list["Place"]]:
        """Returns the tokens of a prompt, its messages and its images, for a branch."""
        tokens = self.renderer.prompt(messages, tools)
        return tokens, messages, self.renderer.places(tokens, references_of(messages))

    def _fork(self, origin: Branch, index: int) -> Branch:
        turn = origin.turns[index]
        end = turn.start + turn.length
        images = [place for place in origin.images if place.start < len(origin.prompt) + end]
        branch = Branch(origin.prompt, origin.messages[: turn.messages], origin.tools, images)
        branch.tokens, branch.mask = origin.tokens[:end], origin.mask[:end]
        branch.logprobs, branch.versions = origin.logprobs[:end], origin.versions[:end]
        branch.turns = [replace(t) for t in origin.turns[: index + 1]]
        branch.inherited = len(branch.turns)
        self.branches.append(branch)
        return branch

    def _say(self, branch: Branch, tokens: Sequence[int], images: Sequence[str] = ()) -> Ended | None:
        """Appends tokens of the environment, if a token can be sampled after them."""
        if len(branch.tokens) + len(tokens) >= self.limits.max_tokens:
            return self._end(branch)
        branch.images += self.renderer.places(tokens, images, len(branch.prompt) + len(branch.tokens))
        self._append(branch, tokens, [0.0] * len(tokens), None)
        return None

    def _end(self, branch: Branch) -> Ended:
        branch.ended = "max_tokens"
        return Ended(branch.ended)

    def _check_idle(self, branch: Branch) -> None:
        if branch.in_flight:
            raise DataError(f"sample {self.sample_id}: its latest turn is not generated yet")

    def _spent(self) -> int:
        """Returns the number of tokens that are sampled or asked for."""
        return sum(t.length for b in self.branches for t in b.own_turns) + sum(b.in_flight for b in self.branches)

    def _append(self, branch: Branch, tokens: Sequence[int], logprobs: Sequence[float], version: int | None) -> None:
        """Appends tokens that weights of this version sampled; None: context."""
        if len(tokens) != len(logprobs):
            raise ValueError(f"sample {self.sample_id}: {len(tokens)} tokens came with {len(logprobs)} log-probs")
        branch.tokens += [int(t) for t in tokens]
        branch.logprobs += [float(p) for p in logprobs]
        branch.mask += [version is not None] * len(tokens)
        branch.versions += [-1 if version is None else version] * len(tokens)

    def _cut(self, branch: Branch, end: int) -> None:
        del branch.tokens[end:], branch.mask[end:], branch.logprobs[end:], branch.versions[end:]
        branch.images = [place for place in branch.images if place.start < len(branch.prompt) + end]
