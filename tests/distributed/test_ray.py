"""On a Ray cluster of several hosts: the same run, also after a host was lost. And what is asked of the cluster."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from distflow.cli import main
from distflow.config import Config, load_config
from distributed.cluster import CURVES, STEPS, curve, saved_step, wait_until, write_config
from hosts import Host, Hosts, why_not
from limits import load_factor

try:
    from distflow.cluster import ray as ray_launcher
except Exception:  # Ray is an extra
    ray_launcher = None  # type: ignore[assignment]

needs_ray = pytest.mark.skipif(ray_launcher is None, reason="Ray is not installed (pip install -e '.[ray]')")
reason = why_not()
needs_hosts = pytest.mark.skipif(reason is not None, reason=str(reason))
# Ray's own default for what it starts is 15.
ENV = {
    "RAY_worker_niceness": "0",
    "OMP_NUM_THREADS": "1",
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
}
PORT = 6379


def config_with(folder: Path, **changes: Any) -> Config:
    return load_config(write_config(folder, **changes))


@pytest.mark.skipif(ray_launcher is not None, reason="Ray is installed")
def test_without_ray_one_error_says_how_to_install_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", str(write_config(tmp_path)), "--launcher", "ray"])
    assert ended.value.code == 2
    assert re.search(
        r"^distflow: --launcher ray: Ray is not installed \(.*\); pip install -e '\.\[ray\]' in your clone.*$",
        capsys.readouterr().err,
    )


def test_an_address_without_ray_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", str(write_config(tmp_path)), "--address", "host:6379"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == "distflow: --address is for --launcher ray\n"


@needs_ray
def test_each_rank_set_asks_for_its_own_resources(tmp_path: Path) -> None:
    config = config_with(
        tmp_path,
        placement={"ranks": {"rollout": "0-1", "train": "2-3"}},
        ray={"resources": {"all": {"CPU": 2}, "rollout": {"GPU": 1, "CPU": 1, "rollout": 0.1}}},
    )
    rollout, train = {"CPU": 2.0, "GPU": 1.0, "rollout": 0.1}, {"CPU": 2.0}
    assert ray_launcher.resources_by_rank(config, 4, {}) == [rollout, rollout, train, train]


@needs_ray
def test_a_worker_asks_for_a_gpu_where_there_are_any(tmp_path: Path) -> None:
    config = config_with(tmp_path)
    assert ray_launcher.resources_by_rank(config, 2, {"CPU": 8.0}) == [{"CPU": 1.0}] * 2
    assert ray_launcher.resources_by_rank(config, 2, {"CPU": 8.0, "GPU": 2.0}) == [{"GPU": 1.0}] * 2


@needs_ray
def test_resources_of_an_unknown_rank_set_are_refused(tmp_path: Path) -> None:
    config = config_with(tmp_path, placement={"ranks": {"rollout": "0-1"}}, ray={"resources": {"rolout": {"GPU": 1}}})
    with pytest.raises(Exception, match=r"ray\.resources: unknown rank set 'rolout'.*rollout"):
        ray_launcher.check_resources(config, 4)


@needs_ray
@pytest.mark.parametrize(
    ("resources", "nodes", "bundles"),
    [
        ("aaaa", "xyxy", [0, 2, 1, 3]),
        ("aabb", "xyyx", [0, 1, 3, 2]),
        ("abab", "xyzx", [0, 3, 2, 1]),  # no other bundle would do for a rank
        ("aaa", "zzz", [0, 1, 2]),
    ],
)
def test_ranks_of_a_node_are_consecutive_where_their_needs_are_the_same(
    resources: str, nodes: str, bundles: list[int]
) -> None:
    assert ray_launcher.assign_ranks([{r: 1.0} for r in resources], list(nodes)) == bundles


@needs_ray
@pytest.mark.parametrize(
    ("address", "message"),
    [
        (
            "ray://head:10001",
            "--address ray://head:10001: use `ray job submit`, or give host:port of the cluster's head",
        ),
        ("127.0.0.1:1", "--address 127.0.0.1:1: no Ray cluster can be reached there: .*refused"),
        ("head", "--address head: no Ray cluster can be reached there"),
    ],
)
def test_an_address_without_a_cluster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], address: str, message: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", str(write_config(tmp_path)), "--launcher", "ray", "--address", address])
    assert ended.value.code == 2
    assert re.match(f"distflow: {message}", capsys.readouterr().err)


def start_node(host: Host, *options: str) -> None:
    ray = ["ray", "start", "--num-cpus=2", "--object-store-memory=80000000", f"--node-ip-address={host.address}"]
    host.run([*ray, "--disable-usage-stats", *options], ENV, timeout_s=180)


@pytest.fixture
def cluster() -> Iterator[Hosts]:
    """Three nodes, two CPUs each: four workers leave one to spare. Rank 0 and the launcher are not where it is lost."""
    with Hosts(3, rate="1gbit", private=["/tmp/ray"]) as hosts:
        head = f"{hosts[0].address}:{PORT}"
        start_node(hosts[0], "--head", f"--port={PORT}", '--resources={"head": 2}')
        for host in hosts[1:]:
            start_node(host, f"--address={head}", '--resources={"other": 2}')
        yield hosts


def command(hosts: Hosts, name: str) -> list[str]:
    python = [sys.executable, "-m", "distflow", "run", "config.yaml", f"run_dir={name}"]
    return [*python, "--launcher", "ray", "--address", f"{hosts[0].address}:{PORT}"]


@needs_ray
@needs_hosts
@pytest.mark.slow
def test_too_small_a_cluster_is_reported_with_what_is_missing(cluster: Hosts, tmp_path: Path) -> None:
    write_config(tmp_path, ray={"resources": {"all": {"huge": 1}}, "start_limit_s": 3})
    done = cluster[0].popen(command(cluster, "run"), ENV, cwd=str(tmp_path), stderr=subprocess.PIPE, text=True)
    _, err = done.communicate(timeout=200 * load_factor())
    assert done.returncode == 2
    assert "could not be placed on the cluster within 3 s: 4 workers need 4 huge of 0; add nodes" in err


@needs_ray
@needs_hosts
@pytest.mark.slow
@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT])
def test_a_launcher_that_is_asked_to_stop_lets_the_workers_save_their_step(
    cluster: Hosts, tmp_path: Path, sign: signal.Signals
) -> None:
    write_config(tmp_path, steps=1000)
    log = tmp_path / "log"
    with open(log, "w") as f:
        process = cluster[0].popen(command(cluster, "run"), ENV, cwd=str(tmp_path), stdout=f, stderr=f)
    wait_until(lambda: saved_step(tmp_path / "run") >= 1, [process], log)
    launchers = [p for p in cluster[0].pids() if b"--launcher" in Path(f"/proc/{p}/cmdline").read_bytes()]
    os.kill(launchers[0], sign)
    assert process.wait(120 * load_factor()) == 128 + sign, log.read_text()
    step = saved_step(tmp_path / "run")
    assert step == curve(tmp_path / "run")[-1][0]
    again = f"distflow run config.yaml run_dir=run --workers=4 --launcher=ray --address={cluster[0].address}:{PORT}"
    last = log.read_text().splitlines()[-1]
    assert last == f"distflow: stopped by {sign.name}; continue from step {step}: {again} --resume"
    for host in cluster:
        assert not [p for p in host.pids() if b"config.yaml" in Path(f"/proc/{p}/cmdline").read_bytes()]


@needs_ray
@needs_hosts
@pytest.mark.slow
def test_a_run_that_loses_a_node_ends_with_the_undisturbed_curve(cluster: Hosts, tmp_path: Path) -> None:
    write_config(
        tmp_path,
        placement={"ranks": {"first": "0-1", "second": "2-3"}},
        ray={"resources": {"first": {"CPU": 1, "head": 1}, "second": {"CPU": 1, "other": 1}}},
    )
    job = ["ray", "job", "submit", "--address", "http://127.0.0.1:8265", "--", "sh", "-c"]
    calm = cluster[0].run([*job, f"cd {tmp_path} && exec {' '.join(command(cluster, 'calm'))}"], ENV, timeout_s=400)
    assert "succeeded" in calm.stdout, calm.stdout
    expected = curve(tmp_path / "calm")
    assert [row[0] for row in expected] == list(range(1, STEPS + 1))

    lose_a_node(cluster, tmp_path)
    assert curve(tmp_path / "lost") == expected


@needs_ray
@needs_hosts
@pytest.mark.slow
def test_the_demo_survives_the_loss_of_a_node(cluster: Hosts, tmp_path: Path) -> None:
    python = [sys.executable, "-m", "distflow"]
    sorting = Path(__file__).parents[2] / "examples" / "sorting"
    model, data = tmp_path / "model", tmp_path / "data"
    subprocess.run([sys.executable, str(sorting / "data.py"), str(data)], check=True)
    warmup = [str(sorting / "warmup.yaml"), f"data.files={data}/warmup.jsonl", f"eval.files={data}/held_out.jsonl"]
    subprocess.run([*python, "run", *warmup, f"run_dir={tmp_path}/warmup"], check=True, env=os.environ | ENV)
    subprocess.run([*python, "export", str(tmp_path / "warmup"), str(model)], check=True)
    config = yaml.safe_load((sorting / "grpo.yaml").read_text())
    config |= {
        "model": str(model),
        "data": config["data"] | {"files": str(data / "train.jsonl")},
        "eval": config["eval"] | {"files": str(data / "held_out.jsonl")},
        "reward": f"{sorting}/reward.py:compute_score",
        "workers": 4,
        "checkpoint": {"every": 1},
        "placement": {"ranks": {"first": "0-1", "second": "2-3"}},
        "ray": {"resources": {"first": {"CPU": 1, "head": 1}, "second": {"CPU": 1, "other": 1}}},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    cluster[0].run(["sh", "-c", f"cd {tmp_path} && exec {' '.join(command(cluster, 'calm'))}"], ENV, timeout_s=900)
    lose_a_node(cluster, tmp_path, after=20)
    calm, lost = (curve(tmp_path / name, (*CURVES, "val/all/score")) for name in ("calm", "lost"))
    assert len(calm) == config["steps"] + 1  # and the evaluation before training
    assert lost == calm
    assert calm[-1][-1] > 0.9


def lose_a_node(hosts: Hosts, folder: Path, after: int = 2) -> None:
    """Runs config.yaml in `lost`, kills the host of ranks 2-3 after that many steps, and waits for the end."""
    log = folder / "log"
    with open(log, "w") as f:
        launcher = hosts[0].popen(command(hosts, "lost"), ENV, cwd=str(folder), stdout=f, stderr=f)
    wait_until(lambda: saved_step(folder / "lost") >= after, [launcher], log)
    (name,) = set(re.findall(r"ranks 2-3 on (host\d)", log.read_text()))
    victim = next(host for host in hosts if host.name == name)
    victim.kill()
    assert launcher.wait(600) == 0, log.read_text()
    text = log.read_text()
    assert re.search(rf"^distflow: .*{victim.name}", text.partition("restart 1")[0], re.M), text
    assert re.search(r"^distflow: restart 1 of 3 in 1 s, from step \d", text, re.M), text
    (spare,) = set(re.findall(r"ranks 2-3 on (host\d)", text)) - {victim.name}
    assert spare != "host0"
