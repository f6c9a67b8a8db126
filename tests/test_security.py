"""What must not be in the source, and what must not be open to others."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import distflow
from distflow.config import load_config
from distflow.config.schema import ModelConfig
from limits import load_factor

SOURCE = Path(distflow.__file__).parent

# Code and objects from data: (what is called, the only file that may, and why).
ALLOWED = {
    ("exec", "sandbox/jail/program.py"): "runs the untrusted program, after isolation",
    ("compile", "sandbox/jail/program.py"): "the same",
    ("exec", "sandbox/remote_tests.py"): "runs tests of the data set, inside the sandbox only",
    ("compile", "sandbox/remote_tests.py"): "the same",
    ("exec", "sandbox/solution.py"): "runs the untrusted program, inside the sandbox only",
    ("compile", "sandbox/solution.py"): "the same",
    ("eval", "sandbox/judge_builtins.py"): "literals and operators only, inside the sandbox only",
    ("compile", "sandbox/judge_builtins.py"): "the same",
    ("__import__", "sandbox/jail/main.py"): "imports only module names written in that file",
}
CODE = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "yaml.load", "yaml.unsafe_load"}
PICKLES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


TREES = {path.relative_to(SOURCE).as_posix(): ast.parse(path.read_text()) for path in SOURCE.rglob("*.py")}


@pytest.mark.parametrize("folder", sorted({name.rpartition("/")[0] for name in TREES}))
def test_no_code_from_data_and_no_pickles(folder: str) -> None:
    for name, tree in TREES.items():
        if name.rpartition("/")[0] == folder:
            check_file(name, tree)


def check_file(name: str, tree: ast.AST) -> None:
    for called, node in calls(tree):
        words = {k.arg: ast.unparse(k.value) for k in node.keywords}
        assert called not in CODE or (called, name) in ALLOWED, f"{name}:{node.lineno}: {called}"
        assert called != "torch.load" or words.get("weights_only") == "True", f"{name}:{node.lineno}: torch.load"
        assert words.get("shell") != "True", f"{name}:{node.lineno}: shell=True"
        assert words.get("allow_pickle") != "True", f"{name}:{node.lineno}: allow_pickle"
        assert words.get("trust_remote_code") != "True", f"{name}:{node.lineno}: trust_remote_code"
        assert "_object" not in called or not called.startswith("dist."), f"{name}:{node.lineno}: pickles over the wire"
    for statement in ast.walk(tree):
        names = [a.name for a in statement.names] if isinstance(statement, ast.Import) else []
        names += [statement.module or ""] if isinstance(statement, ast.ImportFrom) else []
        assert not PICKLES & {n.partition(".")[0] for n in names}, f"{name}: imports {names}"


def test_what_is_allowed_is_still_there() -> None:
    found = {(called, name) for name, tree in TREES.items() for called, _ in calls(tree)}
    assert set(ALLOWED) <= found


def test_a_config_is_data() -> None:
    import distflow.config.yaml

    assert issubclass(distflow.config.yaml._Loader, yaml.SafeLoader)


def test_code_of_a_model_is_run_only_when_asked_for() -> None:
    assert not ModelConfig(path="somewhere").trust_remote_code


def test_a_run_listens_to_nobody_outside_and_writes_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_very_secret")
    monkeypatch.setenv("WANDB_API_KEY", "hf_very_secret")
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"prompt": f"p{i}"}) + "\n" for i in range(8)))
    (tmp_path / "flow.py").write_text(LISTENERS)
    config = {
        "flow": "flow.py:look_around",
        "data": {"files": "data.jsonl", "batch": 4},
        "steps": 1,
        "workers": 2,
        "run_dir": str(tmp_path / "run"),
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    assert load_config(tmp_path / "config.yaml").workers == 2
    monkeypatch.setenv("DISTFLOW_SHARED_MEMORY", "0")  # all goes over sockets
    command = [sys.executable, "-m", "distflow", "run", str(tmp_path / "config.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120 * load_factor())
    assert done.returncode == 0, done.stderr
    assert "very_secret" not in done.stdout + done.stderr
    found = [json.loads(p.read_text()) for p in tmp_path.glob("listens.*")]
    assert len(found) == 2
    assert all(found), "where do the workers meet?"
    assert {host for one in found for host in one} <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}, found
    for path in (p for p in (tmp_path / "run").rglob("*") if p.is_file()):
        assert b"very_secret" not in path.read_bytes(), path


LISTENERS = '''
import ipaddress, json, os
from pathlib import Path
from distflow import flow, node


def listening():
    """Addresses on which this process, or the one that started it, listens."""
    mine = set()
    for pid in (os.getpid(), os.getppid()):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            try:
                mine.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
            except OSError:
                pass
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in mine:
                raw = bytes.fromhex(words[1].partition(":")[0])
                yield str(ipaddress.ip_address(b"".join(raw[i : i + 4][::-1] for i in range(0, len(raw), 4))))


@node
def look(batch):
    Path(__file__).with_name(f"listens.{os.environ['RANK']}").write_text(json.dumps(sorted(listening())))


@flow
def look_around(data):
    look(data["prompt"])
'''
