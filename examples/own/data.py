"""Writes prompts that ask for a number."""

import json

with open("prompts.jsonl", "w") as file:
    for i in range(64):
        file.write(json.dumps({"prompt": f"a number after {i}: "}) + "\n")
