"""What rank 0 writes about a run into its folder."""

import json
import platform
from pathlib import Path

import pytest

from distflow import __version__
from distflow.config import load_config
from distflow.errors import ConfigError
from distflow.flow import Flow, Node
from distflow.plan import Placement, Workload, plan
from distflow.run.description import describe_run
from distflow.run.redaction import redact
from distflow.run_folder import make_dir

ROOT = Path(__file__).parents[2]
PLAN = plan(Flow("flow", ("prompt",), (Node("score", reads=("prompt",)),)), Placement(3), Workload(6))
EXAMPLES = sorted(p for p in (ROOT / "examples").rglob("*.yaml") if p.parent.name != "clusters")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: str(p.relative_to(ROOT / "examples")))
def test_the_resolved_config_is_the_config(path: Path, tmp_path: Path) -> None:
    config = load_config(path, [f"run_dir={tmp_path / 'run'}", "train.lr=3e-7", "steps=7"])
    describe_run(config, PLAN)
    resolved = load_config(tmp_path / "run" / "config.yaml")
    assert resolved.model_dump() == config.model_dump()
    assert (resolved.train.lr, resolved.steps) == (3e-7, 7)
    assert f"relative to {path.parent}\n" in (tmp_path / "run" / "config.yaml").read_text()


def test_versions_are_written(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("{flow: sft, data: rows.jsonl}")
    describe_run(load_config(tmp_path / "run.yaml", [f"run_dir={tmp_path / 'run'}"]), PLAN)
    versions = json.loads((tmp_path / "run" / "versions.json").read_text())
    assert list(versions) == ["distflow", "torch", "transformers", "numpy", "python"]
    assert (versions["distflow"], versions["python"]) == (__version__, platform.python_version())


def test_a_folder_that_cannot_be_created_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"^run_dir: .*/file/run cannot be created: Not a directory; choose another"):
        make_dir(tmp_path / "file" / "run")


def test_the_plan_the_seeds_and_the_hosts_are_written(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("{flow: sft, data: rows.jsonl, seed: 7}")
    hosts = [{"host": "a", "address": "10.0.0.1", "device": "cpu", "ranks": "0-2"}]
    describe_run(load_config(tmp_path / "run.yaml", [f"run_dir={tmp_path / 'run'}"]), PLAN, hosts)
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["nodes"][1]["id"] == "score"
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (run["workers"], run["plan"], run["hosts"]) == (3, PLAN.hash, hosts)
    assert run["seeds"] == {"model": 7, "data": 7, "rollout": 7, "eval": 7 ^ 0x5EED}
    assert not list((tmp_path / "run").glob("*.part"))


def test_secrets_are_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = "sk-" + "a1" * 12
    args = f"{{api_key: hunter2, max_tokens: 5, eos_token: x, hosts: ['http://me:pw@judge/'], note: use {key} now}}"
    (tmp_path / "run.yaml").write_text(f"{{flow: sft, data: rows.jsonl, reward: {{call: r.py:f, args: {args}}}}}")
    config = load_config(tmp_path / "run.yaml", [f"run_dir={tmp_path / 'run'}"])
    monkeypatch.setattr("sys.argv", ["distflow", "run", "reward.args.api_key=hunter2", f"name={key}"])
    describe_run(config, PLAN)
    written = "".join(p.read_text() for p in (tmp_path / "run").iterdir())
    assert not any(secret in written for secret in ("hunter2", key, "pw@"))
    assert config.reward is not None
    assert config.reward.functions[0].args["api_key"] == "hunter2"  # the run itself has it
    kept = load_config(tmp_path / "run" / "config.yaml").reward
    assert kept is not None
    assert kept.functions[0].args["max_tokens"] == 5
    assert kept.functions[0].args["eos_token"] == "x"


@pytest.mark.parametrize("key", ["token", "HF_TOKEN", "wandb.api_key", "my-password", "aws_secret_access_key"])
def test_these_are_keys_of_secrets(key: str) -> None:
    assert redact({key: "x"}) == {key: "<redacted>"}


@pytest.mark.parametrize("key", ["max_tokens", "stop", "pad_token", "tokenizer", "key", "tokens"])
def test_these_are_not(key: str) -> None:
    assert redact({key: "x", "seed": 3}) == {key: "x", "seed": 3}
