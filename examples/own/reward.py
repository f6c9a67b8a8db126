"""Scores the share of digits in a response."""


def digits(prompts, completions, **columns):
    return [sum(c.isdigit() for c in completion) / max(1, len(completion)) for completion in completions]
