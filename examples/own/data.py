"""Prompts to which a number is to be said."""

import json

with open("prompts.jsonl", "w") as file:
    for i in range(64):
        file.write(json.dumps({"prompt": f"a number after {i}: "}) + "\n")
