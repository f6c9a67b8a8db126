"""`srun distflow run`, with a real Slurm: its tasks are the workers."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from distributed.test_run import misbehaving, orphans, write_config
from limits import load_factor, wait_until
from slurm import slurm, why_not

pytestmark = [pytest.mark.slow, pytest.mark.skipif(why_not() is not None, reason=why_not() or "")]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with slurm(tmp_path_factory.mktemp("slurm") / "slurm") as environment:
        yield environment | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}


def srun(cluster: dict[str, str], path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = ["srun", "-n", "2", "--overcommit", sys.executable, "-m", "distflow", "run", str(path), *words]
    done = subprocess.run(command, env=cluster, capture_output=True, text=True, timeout=240 * load_factor())
    wait_until(lambda: not orphans(path), 20, lambda: f"{orphans(path)} go on")
    return done


def test_the_tasks_of_a_step_are_the_workers(cluster: dict[str, str], tmp_path: Path) -> None:
    done = srun(cluster, write_config(tmp_path))
    assert done.returncode == 0, done.stderr
    assert re.search(r"^distflow: 2 workers on 1 host: \S+ \([\d.]+\): ranks 0-1$", done.stderr, re.M), done.stderr
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3]
    assert not list((tmp_path / "run").glob("metrics.*.jsonl"))  # one run, not two that fight for the folder


def test_a_task_that_is_killed_ends_the_step_with_a_report(cluster: dict[str, str], tmp_path: Path) -> None:
    done = srun(cluster, misbehaving(tmp_path, "kill"))
    assert done.returncode != 0
    assert re.search(r"^srun: error: \S+: task 1: Killed$", done.stderr, re.M), done.stderr
    assert re.search(r"^distflow: .*lost (one of )?ranks? 1\b", done.stderr, re.M), done.stderr


def test_a_task_that_is_stopped_is_named(cluster: dict[str, str], tmp_path: Path) -> None:
    done = srun(cluster, misbehaving(tmp_path, "stop", wait_limit_s=3))
    assert done.returncode != 0
    assert re.search(r"who waits for whom:\n", done.stderr), done.stderr
    assert re.search(r"^rank 1 has had no heartbeat for \d+ s", done.stderr, re.M), done.stderr


def test_a_batch_script_runs(cluster: dict[str, str], tmp_path: Path) -> None:
    """The sbatch file of the examples, on one node of this cluster."""
    path = write_config(tmp_path)
    text = (ROOT / "examples" / "clusters" / "slurm.sbatch").read_text()
    text = re.sub(r"^#SBATCH --(gpus|cpus|nodes).*\n", "", text, flags=re.M)
    text = re.sub(r"--ntasks-per-node=\d+", "--ntasks=2\n#SBATCH --overcommit", text)
    text = re.sub(r"\bdistflow run\b", f"{sys.executable} -m distflow run", text)
    script, log = tmp_path / "job.sbatch", tmp_path / "job.log"
    script.write_text(text)
    command = ["sbatch", "--wait", f"--output={log}", str(script), str(path)]
    done = subprocess.run(
        command, env=cluster, capture_output=True, text=True, timeout=240 * load_factor(), cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr + log.read_text()
    assert "step 3/3" in log.read_text()
