"""Reasoning as models write it: at the beginning of a turn, up to a mark; a template may write the mark before it."""

THINK, THINK_END = "<think>", "</think>"


def take_reasoning(content: str) -> tuple[str | None, str]:
    """Returns the reasoning, without its marks, and the rest; None if it has no end."""
    thought, end, rest = content.partition(THINK_END)
    return (thought.lstrip().removeprefix(THINK), rest) if end else (None, content)


def with_reasoning(thought: str | None, answer: str) -> str:
    """Returns the content of a turn from what an API has apart."""
    return answer if thought is None else f"{THINK}{thought}{THINK_END}{answer}"
