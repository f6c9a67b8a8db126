"""Pydantic AI as it is."""

import json
import os
import sys

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel

agent = Agent(OpenAIChatModel(os.environ["OPENAI_MODEL"]), instructions="Add with the tool.")


@agent.tool_plain
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


print(json.dumps({"reward": float("3" in agent.run_sync(json.load(sys.stdin)["prompt"]).output)}))
