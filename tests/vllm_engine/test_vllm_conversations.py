"""Conversations with vLLM are those with the built-in engine: of an environment, of an agent, and with a judge."""

import json
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: `make test-vllm`")

from distributed.test_conversation_runs import ENVIRONMENT, FLOW, ROWS, Run, run

AGENT = """
import json
import urllib.request


def ask(base_url, api_key, prompt):
    messages = [{"role": "user", "content": prompt}]
    for _ in range(2):
        body = json.dumps({"messages": messages, "max_tokens": 6}).encode()
        request = urllib.request.Request(f"{base_url}/chat/completions", body, {"Authorization": f"Bearer {api_key}"})
        with urllib.request.urlopen(request) as reply:
            said = json.load(reply)["choices"][0]["message"]["content"]
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "and?"}]
    return 0.0
"""
CURVES = ("reward/mean", "actor/loss", "actor/grad_norm", "judge/unread", "env/agent/turns", "env/echo/turns")
JUDGE = """
from distflow.roles.judge import Judge


class Reader(Judge):
    def read(self, verdict):
        return sum(verdict.encode()) % 7 / 6
"""


def run_with(engine: str, folder: Path) -> Run:
    """Generates, answers the endpoint and judges with one engine on each of two workers, which also train."""
    rollout = {"n": 2, "max_tokens": 40, "engine": engine, "kv_cache_gb": 0.05, "max_sequences": 8, "verify_every": 1}
    args = {"question": "{prompt}{response}", "max_tokens": 3, "model": "actor"}
    return run(
        folder,
        engine,
        2,
        model={"arch": "qwen2", "hidden": 128, "layers": 1, "heads": 4, "kv_heads": 2},
        rollout=rollout,
        environment=None,
        environments={"echo": {"call": "game.py:Echo", "turn_tokens": 8}, "agent": "agent.py:ask"},
        roles={"reward": {"call": "judge.py:Reader", "args": args}},
        steps=2,
        wait_limit_s=240,
    )


def test_conversations_are_those_with_the_built_in_engine(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for name, text in {"flow.py": FLOW, "game.py": ENVIRONMENT, "agent.py": AGENT, "judge.py": JUDGE}.items():
        (tmp_path / name).write_text(text)
    ours, theirs = run_with("vllm", tmp_path), run_with("builtin", tmp_path)
    assert len(ours.rows) == 16
    assert ours.rows == theirs.rows
    for a, b in zip(ours.metrics, theirs.metrics, strict=True):
        for key in (
            "reward/mean",
            "actor/loss",
            "actor/grad_norm",
            "judge/unread",
            "env/agent/turns",
            "env/echo/turns",
        ):
            assert a[key] == pytest.approx(b[key], rel=1e-3, abs=1e-5), (key, a["step"])
        assert a["env/agent/failures"] == a["env/echo/failures"] == 0
        assert a["rollout/mismatch_max"] < 1e-4
    assert len({m["reward/mean"] for m in ours.metrics}) == 2  # the judge has learnt something
