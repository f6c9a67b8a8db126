"""OpenAI's Agents SDK as it is, with a function tool and the Responses API."""

import json
import sys

from agents import Agent, Runner, function_tool, set_tracing_disabled

set_tracing_disabled(True)


@function_tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


agent = Agent(name="adder", instructions="Add with the tool.", tools=[add])
result = Runner.run_sync(agent, json.load(sys.stdin)["prompt"])
print(json.dumps({"reward": float("3" in result.final_output)}))
