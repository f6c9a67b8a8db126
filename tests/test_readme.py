"""The README: its own flow runs word for word, its GRPO is ours, and it stays short."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import distflow
from limits import load_factor

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_flow_in_the_readme_runs(tmp_path: Path) -> None:
    for kind, name in (("python", "flow.py"), ("yaml", "mine.yaml")):
        block = re.search(rf"```{kind}\n# {name}.*?\n(.*?)```", README, re.S)
        assert block, name
        (tmp_path / name).write_text(block[1])
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": "hello"}) for _ in range(8)))
    for command in ("plan", "run"):
        words = [sys.executable, "-m", "distflow", command, "mine.yaml"]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=90 * load_factor())
        assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "runs/mine/metrics.jsonl").read_text().splitlines()]
    assert [m["length/mean"] for m in lines] == [5.0, 5.0]


def test_grpo_in_the_readme_is_the_one_that_is_built_in(tmp_path: Path) -> None:
    file = ROOT / "src/distflow/flows/grpo.py"
    assert f"a file of {len(file.read_text().splitlines())} lines" in README
    imports = "\n".join(re.findall(r"^from .*", file.read_text(), re.M))
    block = re.search(r"```python\n(@flow.*?)```", README, re.S)
    assert block
    (tmp_path / "shown.py").write_text(f"{imports}\n\n\n{block[1]}")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "hello"}\n')
    model = {"arch": "qwen2", "hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2}
    config = {"model": model, "data": {"files": str(tmp_path / "rows.jsonl"), "batch": 1}, "reward": "math:fsum"}
    graphs = [
        [(n.id, n.call, n.reads, n.writes) for n in distflow.plan(config, flow=flow).flow.nodes]
        for flow in (f"{tmp_path}/shown.py:grpo", "grpo")
    ]
    assert len(graphs[0]) == 4
    assert graphs[0] == graphs[1]


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 120


def test_its_picture_is_small() -> None:
    for picture in (ROOT / "docs/images").iterdir():
        assert picture.stat().st_size < 300_000, picture.name


def test_it_asks_for_the_versions_that_the_package_does() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (torch,) = [d.removeprefix("torch>=") for d in project["dependencies"] if d.startswith("torch>=")]
    python = project["requires-python"].removeprefix(">=")
    assert f"Python ≥ {python}, PyTorch ≥ {torch}" in README
