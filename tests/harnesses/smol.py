"""An agent of smolagents as it is, whose tool calls are read from text."""

import json
import os
import sys

from smolagents import OpenAIServerModel, ToolCallingAgent, tool


@tool
def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: one.
        b: the other.
    """
    return a + b


model = OpenAIServerModel(
    os.environ["OPENAI_MODEL"], api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"]
)
agent = ToolCallingAgent(tools=[add], model=model, max_steps=3, verbosity_level=0)
print(json.dumps({"reward": float("3" in str(agent.run(json.load(sys.stdin)["prompt"])))}))
