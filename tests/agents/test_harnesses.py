"""Agents of other projects as they are, in an environment of their own (`make test-harnesses`): a tool loop becomes the
histories of one sample, and a step of training is made of it."""

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from agents.families import written
from agents.scripted_loop import scripted
from distflow.agents.adapters.program import _variables
from distflow.agents.endpoint import EndpointCall
from distflow.agents.session import ConversationLimits
from warm import distflow_run

ROOT = Path(__file__).parents[2]
HARNESSES, ENVIRONMENT = ROOT / "tests/harnesses", ROOT / ".venv-harness"
PATH = f"{ENVIRONMENT / 'bin'}:{ENVIRONMENT / 'node_modules/.bin'}:{os.environ['PATH']}"
# What each is started with, and the histories that its tool loop makes.
COMMANDS: dict[str, tuple[list[str], int]] = {
    "openai-agents": (["openai_agents.py"], 1),
    "anthropic": (["anthropic_tools.py"], 1),
    "pydantic-ai": (["pydantic_agent.py"], 1),
    "langgraph": (["langgraph_agent.py"], 1),
    "smolagents": (["smol.py"], 2),  # tells the model its call as text
    "mini-swe-agent": (["mini_swe.py"], 2),  # a turn without a call is taken out of the history
    "claude-code": (["claude.sh"], 1),
    "codex": (["codex.sh"], 1),
}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not ENVIRONMENT.exists(), reason="run `make .venv-harness/ready`"),
]


def command(name: str) -> list[str]:
    file = COMMANDS[name][0][0]
    return ["sh" if file.endswith(".sh") else str(ENVIRONMENT / "bin/python"), str(HARNESSES / file)]


def uses_its_tool(call: EndpointCall) -> str:
    """Calls the tool that adds, or the one that runs commands, then answers."""
    tools: Mapping[str, Any] = {t["function"]["name"]: t["function"] for t in call.body.tools or []}
    if any(m["role"] in ("tool", "assistant") for m in call.body.messages or []):
        done = {"name": "final_answer", "arguments": {"answer": "3"}}
        return written("qwen", "", [done]) if "final_answer" in tools else "The sum is 3."
    if "add" in tools:
        return written("qwen", "<think>so</think>adding", [{"name": "add", "arguments": {"a": 1, "b": 2}}])
    for name, key in (("bash", "command"), ("Bash", "command"), ("exec_command", "cmd")):
        if name in tools:
            return written("qwen", "", [{"name": name, "arguments": {key: "echo 3 > sum.txt"}}])
    return "The sum is 3."


@pytest.mark.parametrize("name", COMMANDS)
def test_a_tool_loop_is_the_histories_of_one_sample(name: str) -> None:
    with scripted(uses_its_tool, limits=ConversationLimits(8, 100_000)) as loop:
        loop.renderer.text.limit = 200_000
        session = {"base_url": loop.endpoint.session_url(0), "api_key": loop.open(0), "model": "tiny"}
        variables = {**os.environ, **_variables(session), "PATH": PATH, "OPENAI_AGENTS_DISABLE_TRACING": "1"}
        row = json.dumps({"prompt": "What is 1 + 2? Write it to sum.txt."})
        ended = subprocess.run(command(name), input=row, env=variables, capture_output=True, text=True, timeout=300)
        branches = loop.sessions[0].sampled_branches()
        assert loop.sessions[0].generations > 1
    assert ended.returncode == 0, ended.stderr[-2000:]
    last = json.loads(ended.stdout.splitlines()[-1])
    assert (last["reward"] if isinstance(last, dict) else last) == 1, ended.stdout[-2000:]
    assert len(branches) == COMMANDS[name][1], [[m["role"] for m in b.messages] for b in branches]
    assert loop.endpoint.counts["refused"] == 0


@pytest.mark.parametrize("name", COMMANDS)
def test_it_makes_a_step_of_training(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", PATH)
    monkeypatch.setenv("OPENAI_AGENTS_DISABLE_TRACING", "1")
    (tmp_path / "data.jsonl").write_text(json.dumps({"prompt": "What is 1 + 2?"}) + "\n")
    config = {
        "flow": "grpo",
        "model": {"arch": "qwen2", "hidden": 16, "layers": 1, "heads": 2, "kv_heads": 1, "positions": 1 << 18},
        "data": {"files": "data.jsonl", "batch": 1, "max_prompt": 200_000},
        "environment": {"command": command(name), "turn_tokens": 4, "time_limit_s": 600, "on_failure": "error"},
        "rollout": {"n": 2, "max_tokens": 4096},
        "steps": 1,
        "run_dir": str(tmp_path / "run"),
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    ended = distflow_run(tmp_path / "run.yaml", timeout_s=900)
    assert ended.codes == [0], ended.err[-3000:]
    step = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[-1])
    assert (step["env/environment/failures"], step["env/environment/turns"] > 0) == (0, True)
    assert step["actor/grad_norm"] >= 0
    shutil.rmtree(tmp_path / "run")
