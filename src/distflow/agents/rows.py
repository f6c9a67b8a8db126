"""Reads prompts and reward specs from rows, in the forms of public data sets."""

from collections.abc import Mapping
from typing import Any

_ANSWERS = ("ground_truth", "answer", "solution", "label")  # columns of a row without `reward_model`


def as_messages(prompt: Any) -> list[dict[str, Any]]:
    """Returns a prompt as messages: a text is what the user says."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt]


def with_observation(messages: list[dict[str, Any]], observation: Any) -> list[dict[str, Any]]:
    """Appends what `reset` returned to the last message, as text or as content blocks."""
    if observation is None:
        return messages
    *before, last = messages or [{"role": "user", "content": ""}]
    content = last["content"]
    if isinstance(content, str) and isinstance(observation, list):
        content = [{"type": "text", "text": content}]
    elif isinstance(content, list) and not isinstance(observation, list):
        observation = [{"type": "text", "text": str(observation)}]
    elif not isinstance(observation, list):
        observation = str(observation)
    return [*before, {**last, "content": content + observation}]


def reward_spec(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns how a row is scored, as verl and skyrl-gym have it: `ground_truth` is in it if the row has any."""
    if isinstance(row.get("reward_model"), Mapping):
        return dict(row["reward_model"])
    return next(({"method": "rule", "ground_truth": row[c]} for c in _ANSWERS if c in row), {})
