"""The script in the style of a notebook trains with the reward it defines, and generates with the result."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

from limits import load_factor

SCRIPT = Path(__file__).parents[2] / "examples" / "script" / "train.py"


def test_the_script_learns_and_generates(tmp_path: Path) -> None:
    shutil.copy(SCRIPT, tmp_path)
    done = subprocess.run(
        [sys.executable, SCRIPT.name], cwd=tmp_path, capture_output=True, text=True, timeout=300 * load_factor()
    )
    assert done.returncode == 0, done.stderr
    assert re.findall(r"after step (\d+): ", done.stdout) == [str(step) for step in range(1, 13)]
    first, last = re.search(r"reward (\S+) -> (\S+), in 12 steps", done.stdout).groups()  # type: ignore[union-attr]
    assert float(first) < 0.2 < 0.8 < float(last)
    assert "last checkpoint: " in done.stdout
    assert re.search(r"a number after 7: \d{4}", done.stdout)
