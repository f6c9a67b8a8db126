"""An agent of LangGraph as it is."""

import json
import os
import sys

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


agent = create_agent(ChatOpenAI(model=os.environ["OPENAI_MODEL"]), [add], system_prompt="Add with the tool.")
state = agent.invoke({"messages": [("user", json.load(sys.stdin)["prompt"])]})
print(json.dumps({"reward": float("3" in str(state["messages"][-1].content))}))
