"""Tasks that are longer than a history may be: agents that compact theirs, or have subagents, learn them."""

import json
import random
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import yaml

from distflow import export
from warm import distflow_run

PAGE, BUDGET = 20, 16  # bytes of a page, which are tokens; tokens of a history after its prompt
AGENT = """
import json
import urllib.request


def ask(base_url, api_key, *texts):
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    body = json.dumps({"model": "m", "messages": messages}).encode()
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{base_url}/chat/completions", body, headers)) as reply:
        return json.load(reply)["choices"][0]["message"]["content"]


def compacts(base_url, api_key, row):
    '''Reads page by page; all that it takes from one history into the next is a note of one character.'''
    note = ""
    for page in row["pages"]:
        note = ask(base_url, api_key, f"{note}{page}:")[:1]
    return float(ask(base_url, api_key, f"{note}?")[:1] == row["digit"])


def forgets(base_url, api_key, row):
    '''The same, without the note.'''
    for page in row["pages"]:
        ask(base_url, api_key, f"{page}:")
    return float(ask(base_url, api_key, "?")[:1] == row["digit"])


def remembers(base_url, api_key, row):
    '''The same in one history, for which the budget is too small.'''
    said = []
    for page in row["pages"]:
        said += [f"{page}:"]
        said += [ask(base_url, api_key, *said)]
    return float(ask(base_url, api_key, *said, "?")[:1] == row["digit"])


def delegates(base_url, api_key, row):
    '''Says which page it is about; a subagent reads that and reports a character; then it answers.'''
    page = ask(base_url, api_key, row["prompt"])
    read = row["pages"]["ab".find(page[:1])] if page[:1] in ("a", "b") else "?"
    report = ask(base_url, api_key, f"{read}:")[:1]
    return float(ask(base_url, api_key, row["prompt"], page, f" {report}?")[:1] == row["digit"])
"""
Row = dict[str, Any]


def tasks(agent: str, count: int, draw: random.Random) -> list[Row]:
    """A digit is on one of two pages: for the agent that delegates, on the one of which its prompt has the letter."""
    rows = []
    for _ in range(count):
        digits, where = draw.choices("0123", k=2), draw.randrange(2) if agent == "delegates" else 0
        pages = ["".join(draw.sample(4 * d + "uvwxyz" * 3, PAGE)) for d in digits]
        if agent == "delegates":
            prompt = f"page {'ab'[where]}"
        else:
            prompt, pages[1] = f"{pages[0]}:", "".join(draw.choices("uvwxyz", k=PAGE))
        rows.append({"prompt": prompt, "pages": pages, "digit": digits[where]})
    return rows


def turns(agent: str, rows: list[Row], draw: random.Random) -> list[Row]:
    """Turns of a teacher who is right 70% of the time about what the agent shows."""
    found = []

    def say(prompt: str, right: str, among: str = "0123") -> str:
        said = right if draw.random() < 0.6 else draw.choice(among)
        found.append({"prompt": prompt, "response": said})
        return said

    for row in rows:
        pages, digit = row["pages"], row["digit"]
        if agent == "delegates":
            page = say(row["prompt"], row["prompt"][-1], "ab")
            read = pages["ab".index(page)]
            report = say(f"{read}:", next(c for c in read if c.isdigit()))
            say(f"{row['prompt']}{page}<eos> {report}?", report)
        else:
            note = say(f"{pages[0]}:", digit)
            note = say(f"{note}{pages[1]}:", note)
            say(f"{note}?", note)
    draw.shuffle(found)
    return found


def write(path: Path, rows: list[Row]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def train(path: Path, **config: Any) -> list[Row]:
    """Runs a config to its end; returns its metrics."""
    run_dir = path.with_suffix("")
    path.write_text(yaml.safe_dump({"run_dir": str(run_dir), "wait_limit_s": 60, **config}))
    ended = distflow_run(path, timeout_s=600)
    assert ended.codes == [0], ended.err
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def learn(folder: Path, agent: str, seed: int, taught: str | None = None) -> list[Row]:
    """Teaches a model with random weights the turns of an agent, then trains it as that agent; returns the metrics.

    `taught`: another agent, whose turns and tasks it gets.
    """
    draw, taught = random.Random(seed), taught or agent
    (folder / "agent.py").write_text(AGENT)
    write(folder / "turns.jsonl", turns(taught, tasks(taught, 1000, draw), draw))
    write(folder / "tasks.jsonl", tasks(taught, 400, draw))
    train(
        folder / "warmup.yaml",
        flow="sft",
        seed=seed,
        model={"arch": "qwen2", "hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2},
        data={"files": "turns.jsonl", "batch": 64, "rendered": True},
        train={"lr": 3e-3, "warmup": 5},
        rollout={"max_tokens": 4},
        steps=200,
    )
    return train(
        folder / "learns.yaml",
        flow="grpo",
        seed=seed,
        model=str(export(folder / "warmup", folder / "model")),
        data={"files": "tasks.jsonl", "batch": 8, "max_prompt": PAGE + 4},
        environment={"call": f"agent.py:{agent}", "turn_tokens": 2},
        rollout={"n": 8, "max_tokens": BUDGET},
        train={"lr": 1e-3},
        steps=60,
    )


def solved(metrics: list[Row], first: int, last: int) -> float:
    """Returns the fraction of tasks that were solved in some steps."""
    return fmean(m["reward/mean"] for m in metrics[first:last])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("agent", "branches", "compactions"), [("compacts", 3, 2), ("delegates", 2, 0)])
def test_an_agent_with_several_histories_learns(
    agent: str, branches: int, compactions: int, seed: int, tmp_path: Path
) -> None:
    """From a teacher whose three turns are right 70% of the time each, by the reward of the whole sample alone."""
    metrics = learn(tmp_path, agent, seed)
    before, after = solved(metrics, 0, 5), solved(metrics, 55, 60)
    print(f"{agent}, seed {seed}: {before:.0%} before, {after:.0%} after")
    assert all(m["agent/branches"] == branches and m["agent/compactions"] == compactions for m in metrics)
    assert all(m["agent/truncated"] == 0 for m in metrics)
    assert before < 0.65
    assert after > 0.9


@pytest.mark.slow
@pytest.mark.parametrize(("agent", "most"), [("forgets", 0.4), ("remembers", 0.0)])
def test_without_compaction_the_same_task_is_not_solved(agent: str, most: float, tmp_path: Path) -> None:
    """Without the note one of four digits can be guessed; the history of both pages is cut by the budget."""
    metrics = learn(tmp_path, agent, 0, taught="compacts")
    after = solved(metrics, 55, 60)
    print(f"{agent}: {solved(metrics, 0, 5):.0%} before, {after:.0%} after")
    assert metrics[-1]["agent/truncated"] == (agent == "remembers")
    assert after <= most
