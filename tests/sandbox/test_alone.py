"""The sandbox is one folder that needs only the standard library: an audit reads nothing else."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import distflow.sandbox
from distflow.sandbox.walls import MECHANISMS
from limits import load_factor
from sandbox.jails import missing_protection

USE = """
import sys
sys.path.insert(0, sys.argv[1])
from distflow.sandbox.sandbox import Sandbox
with Sandbox() as sandbox:
    print(sandbox.run("print(sum(map(int, input().split())))", "40 2").stdout, end="")
print([m for m in sys.modules if m.startswith("distflow.") and "sandbox" not in m])
"""


def test_a_copy_of_the_folder_alone_runs_a_program(tmp_path: Path) -> None:
    if reason := missing_protection(MECHANISMS):
        pytest.skip(reason)
    shutil.copytree(Path(distflow.sandbox.__file__).parent, tmp_path / "distflow" / "sandbox")
    # -I -S: neither the environment nor installed packages, so not this one either.
    command = [sys.executable, "-I", "-S", "-c", USE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120 * load_factor(), cwd=tmp_path)
    assert done.stdout == "42\n[]\n", done.stderr
