"""An agent that knows nothing of DistFlow: it plays "higher or lower" with whatever model the OpenAI client reaches.

As a coroutine it is given `base_url`, `api_key` and the row; as a program (`python agent.py`) it finds the address and
the key in its environment, where the client looks for them, and the row on stdin.
"""

import asyncio
import json
import os
import sys
from typing import Any

from openai import AsyncOpenAI

GUESSES = 3


async def play(base_url: str, api_key: str, row: dict[str, Any]) -> dict[str, Any]:
    """Asks for a digit until it is the secret one; the reward is higher for fewer guesses."""
    messages: list[Any] = [{"role": "user", "content": row["prompt"]}]
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for guesses in range(1, GUESSES + 1):
            reply = await client.chat.completions.create(model="policy", messages=messages, max_tokens=1)
            guess = reply.choices[0].message.content or ""
            if not (guess.isascii() and guess.isdigit()):
                return {"reward": 0.0}
            if int(guess) == row["secret"]:
                return {"reward": 1.2 - 0.2 * guesses, "metrics": {"guesses": guesses}}
            hint = " higher: " if int(guess) < row["secret"] else " lower: "
            messages += [reply.choices[0].message, {"role": "user", "content": hint}]
    return {"reward": 0.1}


if __name__ == "__main__":
    address, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
    print(json.dumps(asyncio.run(play(address, key, json.load(sys.stdin)))))
