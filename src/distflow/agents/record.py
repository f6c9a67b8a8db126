"""The record of a conversation that has ended, and the columns of a batch that are made of such records."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch

from distflow.agents.session import Session
from distflow.agents.token_tree import compactions, token_tree
from distflow.batch.batch import Ragged
from distflow.batch.branches import branches_column
from distflow.batch.context import MetricLog
from distflow.model.text import Text, ragged
from distflow.plan.field_bytes import PROMPT_IMAGES, RESPONSE_IMAGES

_METRICS = 16  # of an environment's own, at most


@dataclass(frozen=True)
class ConversationRecord:
    """One conversation at its end. `tokens`, `mask`, `logprobs`, `versions` and `turn_rewards` are those of all its
    branches: see TokenTree. `answer`, `messages` and `finished` are those of the branch that was sampled last.
    """

    sample_id: int
    environment: str
    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    turn_rewards: list[float] = field(default_factory=list)
    branches: list[tuple[int, int, int]] = field(default_factory=list)
    prompt_images: list[str] = field(default_factory=list)  # references
    response_images: list[str] = field(default_factory=list)
    answer: list[int] = field(default_factory=list)  # the tokens after its prompt
    messages: list[dict[str, Any]] = field(default_factory=list)
    histories: list[list[dict[str, Any]]] = field(default_factory=list)  # messages of each branch, if there are several
    reward: float = 0.0  # of the whole conversation, with the rewards of its turns
    finished: bool = False  # it was not cut off by a limit
    weight_version: int = 0  # of the first token
    turns: int = 0
    tool_errors: int = 0
    seconds: float = 0.0
    failure: str | None = None
    compactions: int = 0
    limit: str | None = None  # that has ended it
    diverged: bool = False  # its environment did not repeat itself when it was begun again
    metrics: dict[str, float] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def make_record(
    session: Session,
    environment: str,
    prompt: Sequence[int],
    done: Mapping[str, Any],
    weights: Mapping[str, float],
    version: int,
    seconds: float,
    tool_errors: int,
    images: Sequence[str] = (),
) -> ConversationRecord:
    """Returns the record of a conversation. `done`: its result; `weights`: those of reward functions at its end.

    `prompt` and its `images` stand for those of a conversation that never began. Malformed tool calls that the worker
    has counted are `tool_errors`, unless the environment has counted for itself.
    """
    branches = session.sampled_branches()
    if not branches:
        none = ConversationRecord(session.sample_id, environment, list(prompt), weight_version=version, seconds=seconds)
        return replace(none, prompt_images=list(images))
    tree, latest = token_tree(branches), max(branches, key=lambda b: b.last)
    reward, limit = done.get("reward"), session.over or latest.ended
    total = sum(tree.turn_rewards) if reward is None else float(reward)
    total += sum(weights.get(name, 0.0) * value for name, value in (done.get("rewards") or {}).items())
    own = {str(k): float(v) for k, v in (done.get("metrics") or {}).items() if _is_number(v)}
    return ConversationRecord(
        sample_id=session.sample_id,
        environment=environment,
        **vars(tree),
        answer=latest.tokens[: latest.end],
        messages=latest.transcript(),
        histories=[b.transcript() for b in branches] if len(branches) > 1 else [],
        reward=total if math.isfinite(total) else 0.0,
        finished=limit is None and latest.turns[-1].finished,
        weight_version=branches[0].own_turns[0].weight_version,
        turns=sum(len(b.own_turns) for b in branches),
        tool_errors=int(own.pop("tool_errors", tool_errors)),
        seconds=seconds,
        compactions=compactions(branches),
        limit=limit,
        metrics=dict(list(own.items())[:_METRICS]),
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def columns(records: Sequence[ConversationRecord], text: Text) -> dict[str, Any]:
    """Returns the fields that a conversation writes, of records in the order of the batch."""
    tokens = ragged([r.tokens for r in records])
    images = {
        PROMPT_IMAGES: [r.prompt_images for r in records],
        RESPONSE_IMAGES: [r.response_images for r in records],
    }

    def per_token(rows: Sequence[Sequence[float]], dtype: torch.dtype) -> Ragged:
        values = torch.tensor([x for row in rows for x in row], dtype=dtype)
        return Ragged.packed(values, np.array([len(row) for row in rows], np.int64))

    return {
        "prompt_tokens": ragged([r.prompt for r in records]),
        "response_tokens": tokens,
        "rollout_logprobs": per_token([r.logprobs for r in records], torch.float32),
        "response": text.decode(ragged([r.answer for r in records])),
        "finished": torch.tensor([r.finished for r in records], dtype=torch.bool),
        "weight_version": torch.tensor([r.weight_version for r in records], dtype=torch.int64),
        "token_versions": per_token([r.versions for r in records], torch.int32),
        "response_mask": per_token([r.mask for r in records], torch.int8),
        "turn_rewards": per_token([r.turn_rewards for r in records], torch.float32),
        "env_reward": torch.tensor([r.reward for r in records], dtype=torch.float32),
        "response_branches": branches_column([r.branches for r in records]),
        "conversation": [r.messages for r in records],
        "histories": [r.histories for r in records],
        "environment_name": [r.environment for r in records],
        **(images if text.images else {}),
    }


def log_conversations(records: Iterable[ConversationRecord], metrics: MetricLog, prefix: str = "") -> None:
    """Logs `env/<name>/…` and `agent/…`; `prefix` is `val/` for held-out samples."""
    for r in records:
        of = f"{prefix}env/{r.environment}"
        metrics.log(f"{of}/reward", r.reward)
        metrics.log(f"{of}/turns", r.turns)
        metrics.log(f"{of}/seconds", r.seconds)
        metrics.log(f"{of}/tool_errors", r.tool_errors, reduce="sum")
        metrics.log(f"{of}/failures", float(r.failure is not None), reduce="sum")
        metrics.log(f"{prefix}agent/branches", len(r.branches) + 1)
        metrics.log(f"{prefix}agent/compactions", r.compactions)
        metrics.log(f"{prefix}agent/truncated", float(r.limit is not None))
        for limit in ("sample_tokens", "sample_seconds"):
            metrics.log(f"{prefix}agent/over_{limit}", float(r.limit == limit), reduce="sum")
        metrics.log(f"{prefix}agent/diverged", float(r.diverged), reduce="sum")
        for name, value in r.metrics.items():
            metrics.log(f"{of}/{name}", value)
