"""Anthropic's client as it is, with its own loop over tools."""

import json
import os
import sys

from anthropic import Anthropic, beta_tool


@beta_tool
def add(a: int, b: int) -> str:
    """Adds two numbers.

    Args:
        a: one.
        b: the other.
    """
    return str(a + b)


runner = Anthropic().beta.messages.tool_runner(
    model=os.environ["ANTHROPIC_MODEL"],
    max_tokens=400,
    tools=[add],
    messages=[{"role": "user", "content": json.load(sys.stdin)["prompt"]}],
)
last = runner.until_done()
print(json.dumps({"reward": float(any("3" in b.text for b in last.content if b.type == "text"))}))
