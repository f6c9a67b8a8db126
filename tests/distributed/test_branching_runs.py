"""Runs with an agent whose samples have several histories: the same on every layout, and exact resume."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from warm import distflow_run

AGENT = """
import json
import urllib.request


def ask(base_url, api_key, *texts):
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    body = json.dumps({"model": "m", "messages": messages}).encode()
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{base_url}/chat/completions", body, headers)) as reply:
        return json.load(reply)["choices"][0]["message"]["content"]


def branches(base_url, api_key, prompt):
    '''Asks, asks on in two ways, has a subagent, and goes on in a history that begins anew.'''
    first = ask(base_url, api_key, prompt)
    one = ask(base_url, api_key, prompt, first, "more")
    ask(base_url, api_key, prompt, first, "other")
    ask(base_url, api_key, prompt + "part")
    ask(base_url, api_key, prompt, first, "more", one, "on")
    last = ask(base_url, api_key, "in short: " + first[:3])
    return sum(c.isdigit() for c in first + one + last) / 8
"""
FLOW = """
import json

from distflow import flow, node
from distflow.flows.grpo import grpo


@node(writes=())
def keep(batch, ctx):
    fields = ("response_tokens", "response_mask", "response_branches")
    rows = {
        int(batch.ids[i]): [batch[f][i].tolist() for f in fields] + [float(batch["env_reward"][i])]
        for i in range(len(batch))
    }
    with open(ctx.folder / f"tokens.{ctx.rank}.jsonl", "a") as file:
        file.write(json.dumps({"step": ctx.step, "rows": rows}) + "\\n")


class Tapped:
    def __init__(self, actor):
        self.logprobs, self.update, self._actor = actor.logprobs, actor.update, actor

    def generate(self, prompts):
        rollout = self._actor.generate(prompts)
        keep(rollout["response_tokens", "response_mask", "response_branches", "env_reward"])
        return rollout


@flow
def tapped(prompts, actor, reference, reward, *, kl=0.0):
    grpo.fn(prompts, Tapped(actor), reference, reward, kl=kl)
"""
STEPS = 3
CONFIG: dict[str, Any] = {
    "flow": "flow.py:tapped",
    "data": {"files": "data.jsonl", "batch": 4},
    "steps": STEPS,
    "algo": {"kl": 0.01},
    "model": {"arch": "qwen2", "hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2},
    "rollout": {"n": 2, "max_tokens": 60},
    "environment": {"call": "agent.py:branches", "turn_tokens": 5},
    "train": {"lr": 1e-3, "micro_tokens": 256},
    "wait_limit_s": 60,
}
SPLIT = {
    "ranks": {"rollout": "0", "train": "1"},
    "default": {"ranks": "train"},
    "nodes": {"actor.generate": {"ranks": "rollout"}, "reward.score": {"ranks": "rollout"}},
}
CURVES = ("reward/mean", "actor/loss", "actor/grad_norm", "actor/kl", "agent/branches", "agent/compactions")
Run = tuple[list[dict[str, float]], dict[int, list[Any]]]  # metrics; tokens, mask, branches and reward of each sample


def run(folder: Path, name: str, workers: int, resume: str | None = None, **changes: Any) -> Run:
    path, run_dir = folder / f"{name}.yaml", folder / name
    path.write_text(yaml.safe_dump(CONFIG | {"run_dir": str(run_dir)} | changes))
    ended = distflow_run(path, workers=workers, resume=resume)
    assert ended.codes == [0] * workers, ended.err
    rows: dict[int, list[Any]] = {}
    for file in run_dir.glob("tokens.*.jsonl"):
        for line in file.read_text().splitlines():
            for sample, row in json.loads(line)["rows"].items():
                assert rows.setdefault(int(sample), row) == row
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()], rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("branches")
    (folder / "data.jsonl").write_text("".join(json.dumps({"prompt": f"say {i}: "}) + "\n" for i in range(12)))
    (folder / "flow.py").write_text(FLOW)
    (folder / "agent.py").write_text(AGENT)
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> Run:
    return run(folder, "alone", 1)


def test_every_history_of_a_sample_is_trained(alone: Run) -> None:
    metrics, rows = alone
    assert sorted(rows) == list(range(STEPS * 4 * 2))
    assert all(m["actor/grad_norm"] > 0 and m["rollout/mismatch_max"] == 0 for m in metrics)
    assert all(m["agent/branches"] == 4 and m["agent/compactions"] == 1 for m in metrics)
    for tokens, mask, branches, _ in rows.values():
        assert len(tokens) == len(mask)
        assert [parent for _, parent, _ in branches] == [0, 0, 0]
        assert 6 <= sum(mask) <= 6 * 5  # each turn once, none of them in two branches


@pytest.mark.parametrize("name", ["dp2", "split"])
def test_any_layout_gives_the_same_run(folder: Path, alone: Run, name: str) -> None:
    placement: dict[str, Any] = {"placement": SPLIT} if name == "split" else {}
    got, rows = run(folder, name, 2, **placement)
    for ours, theirs in zip(got, alone[0], strict=True):
        for curve in CURVES:
            assert ours[curve] == pytest.approx(theirs[curve], rel=1e-3, abs=1e-6), (curve, ours["step"])
        assert ours["rollout/mismatch_max"] <= (1e-4 if "tp" in name else 0)
    assert rows.keys() == alone[1].keys()
    assert sum(rows[i][:3] == alone[1][i][:3] for i in rows) >= 0.99 * len(rows)


def test_a_resumed_run_goes_on_as_if_nothing_had_happened(folder: Path, alone: Run) -> None:
    checkpoint = {"every": 1, "keep": 9}
    run(folder, "resumed", 1, steps=2, checkpoint=checkpoint)
    got, rows = run(folder, "resumed", 1, resume=str(folder / "resumed"), checkpoint=checkpoint)
    assert [{c: m[c] for c in CURVES} for m in got] == [{c: m[c] for c in CURVES} for m in alone[0]]
    assert rows == alone[1]
