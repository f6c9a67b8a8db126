"""Start a benchmark's own file as N workers, and get what the first of them wrote."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def run_workers(script: str, n: int, *words: str) -> dict[str, Any]:
    """`script --worker FILE …` as N processes of one thread each; the JSON object in FILE."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "row.json"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n)]
        env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        subprocess.run([*torchrun, script, "--worker", str(out), *words], check=True, env=env)
        found: dict[str, Any] = json.loads(out.read_text())
        return found
