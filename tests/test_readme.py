"""The README's own flow, word for word, works."""

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_flow_in_the_readme_runs(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text()
    for kind, name in (("python", "flow.py"), ("yaml", "mine.yaml")):
        block = re.search(rf"```{kind}\n# {name}\n(.*?)```", text, re.S)
        assert block, name
        (tmp_path / name).write_text(block[1])
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": "hello"}) for _ in range(8)))
    for command in ("plan", "run"):
        words = [sys.executable, "-m", "distflow", command, "mine.yaml"]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=90)
        assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "runs/mine/metrics.jsonl").read_text().splitlines()]
    assert [m["length/mean"] for m in lines] == [6.0, 6.0, 6.0]
