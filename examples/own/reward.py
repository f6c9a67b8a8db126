"""The share of digits in a response."""


def digits(prompts, completions, **columns):
    return [sum(c.isdigit() for c in said) / max(1, len(said)) for said in completions]
