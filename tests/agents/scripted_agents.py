"""Agents that are given an endpoint: good ones, and ones with the faults that agents have."""

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import openai

# Calls the endpoint again and again after its parent, and so its sample, has ended.
_LATE = """
import json, sys, time, urllib.error, urllib.request
base_url, key, folder = sys.argv[1:]
statuses = []
while not {200, 410} <= set(statuses):
    body = json.dumps({"messages": [{"role": "user", "content": "late"}]}).encode()
    request = urllib.request.Request(f"{base_url}/chat/completions", body, {"Authorization": f"Bearer {key}"})
    try:
        urllib.request.urlopen(request, timeout=60).read()
        statuses.append(200)
    except urllib.error.HTTPError as e:
        statuses.append(e.code)
open(f"{folder}/late.json", "w").write(json.dumps(statuses))
"""


def asks(base_url: str, api_key: str, row: dict[str, Any]) -> dict[str, Any]:
    """Has a conversation of as many turns as the row says."""
    client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    messages: list[Any] = [{"role": "user", "content": f"question {row['number']}"}]
    for _ in range(row.get("turns", 2)):
        reply = client.chat.completions.create(model="m", messages=messages)
        messages += [reply.choices[0].message, {"role": "user", "content": "go on"}]
    return {"reward": row["number"] / 10, "metrics": {"asked": row.get("turns", 2)}}


async def asks_at_once(base_url: str, api_key: str, prompt: str) -> float:
    """Asks twice at once, then goes on from the second answer."""
    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    first: list[Any] = [{"role": "user", "content": prompt}]
    replies = await asyncio.gather(*(client.chat.completions.create(model="m", messages=first) for _ in range(2)))
    more = [*first, replies[1].choices[0].message, {"role": "user", "content": "go on"}]
    await client.chat.completions.create(model="m", messages=more)
    return 1.0


def misbehaves(base_url: str, api_key: str, row: dict[str, Any], sample_id: int) -> float | None:
    what, folder = row["what"], Path(row["folder"])
    client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    if what == "never":
        return 1.0
    if what == "good":
        return asks(base_url, api_key, row)["reward"]
    if what == "strict":  # as clients are that take a cut turn for an error
        reply = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "be brief"}])
        assert reply.choices[0].finish_reason == "stop"
    if what == "late":
        subprocess.Popen([sys.executable, "-c", _LATE, base_url, api_key, str(folder)], start_new_session=True)
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "in time"}])
        return 1.0
    if what == "victim":
        (folder / "new").write_text(api_key)
        (folder / "new").rename(folder / "key")
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "mine"}])
        _wait_for(folder / "tried")
        return 1.0
    if what == "thief":
        _wait_for(folder / "key")
        thief = openai.OpenAI(base_url=base_url, api_key=(folder / "key").read_text(), max_retries=0)
        try:
            thief.chat.completions.create(model="m", messages=[{"role": "user", "content": "stolen"}])
        finally:
            (folder / "tried").touch()
    if what == "flood":
        asyncio.run(_flood(base_url, api_key))
    if what == "ignores_limits":
        while True:
            try:
                client.chat.completions.create(model="m", messages=[{"role": "user", "content": "again"}])
            except openai.BadRequestError:
                continue
    if what == "hang":
        client.models.list()
        time.sleep(3600)
    raise AssertionError(what)


def _wait_for(file: Path) -> None:
    while not file.exists():
        time.sleep(0.01)


async def _flood(base_url: str, api_key: str) -> None:
    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    messages: list[Any] = [{"role": "user", "content": "flood"}]

    async def call() -> None:
        while True:
            try:
                await client.chat.completions.create(model="m", messages=messages)
            except openai.APIError:
                continue

    await asyncio.gather(*(call() for _ in range(50)))


def main() -> None:
    """A program: reads its row, asks the model that its environment names, prints its reward."""
    row = json.load(sys.stdin)
    print("begins")
    if row.get("what") == "raise":
        raise RuntimeError("the program is broken")
    reward = asks(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], row)
    if not row.get("silent"):
        print(json.dumps(reward))


if __name__ == "__main__":
    main()
