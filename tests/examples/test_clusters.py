"""The files for clusters start workers that find each other, as far as that shows without a cluster."""

import re
import subprocess
from pathlib import Path
from typing import Any

import yaml
from torch.distributed.run import config_from_args, parse_args

from distflow.cli import _parser
from distflow.cluster.launch_env import LaunchEnv, read_launch_env

CLUSTERS = Path(__file__).parents[2] / "examples" / "clusters"


def test_the_tasks_of_the_batch_script_are_workers() -> None:
    path = CLUSTERS / "slurm.sbatch"
    subprocess.run(["bash", "-n", str(path)], check=True)
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", path.read_text(), re.M))
    nodes, tasks = int(options["nodes"]), int(options["ntasks-per-node"])
    assert int(options["gpus-per-node"]) == tasks
    workers = []
    for rank in range(nodes * tasks):
        environ = {
            "SLURM_JOB_ID": "1234",
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NUM_TASKS": str(nodes * tasks),
            "SLURM_STEP_NODELIST": f"gpu[01-{nodes:02d}]",
            "SLURM_STEP_TASKS_PER_NODE": f"{tasks}(x{nodes})",
            "SLURM_PROCID": str(rank),
            "SLURM_NODEID": str(rank // tasks),
            "SLURM_LOCALID": str(rank % tasks),
        }
        workers.append(read_launch_env(environ))
    check(workers, tasks, "gpu01")
    command = re.search(r"^exec srun \S+ distflow (.*)$", path.read_text(), re.M)
    assert command is not None
    words = command[1].replace('"$1"', "train.yaml").replace('"${@:2}"', "steps=3").split()
    args = _parser().parse_args(words)
    assert (args.config, args.overrides, args.resume) == ("train.yaml", ["steps=3"], "auto")


def test_the_pods_of_the_manifest_are_workers() -> None:
    manifest = yaml.safe_load((CLUSTERS / "kubernetes.yaml").read_text())
    assert (manifest["apiVersion"], manifest["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (job,) = manifest["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert spec["completionMode"] == "Indexed"  # which gives each pod its number
    assert {v["name"] for v in pod["volumes"]} == {m["name"] for m in container["volumeMounts"]}
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    workers = []
    for pod_index in range(spec["completions"]):
        args = [a.replace("$(NODE_RANK)", str(pod_index)) for a in container["args"]]
        workers += torchrun_workers(args)
    assert spec["parallelism"] == spec["completions"] == len(workers) // gpus
    name = manifest["metadata"]["name"]  # also of the service under which JobSet makes pods known
    check(workers, gpus, f"{name}-{job['name']}-0-0.{name}")
    assert [p["containerPort"] for p in container["ports"]] == [workers[0].port]
    assert pod["terminationGracePeriodSeconds"] > 60  # stop_limit_s


def torchrun_workers(args: list[str]) -> list[Any]:
    """Returns the places of the workers that this torchrun would start on its host."""
    parsed = parse_args(args)
    config, _, command = config_from_args(parsed)
    worker = _parser().parse_args(command[command.index("distflow") + 1 :])
    assert (worker.config, worker.resume) == ("/config/train.yaml", "auto")
    host, _, port = config.rdzv_endpoint.rpartition(":")
    local = config.nproc_per_node
    return [
        read_launch_env(
            {
                "RANK": str(parsed.node_rank * local + r),
                "WORLD_SIZE": str(config.max_nodes * local),
                "LOCAL_RANK": str(r),
                "LOCAL_WORLD_SIZE": str(local),
                "MASTER_ADDR": host,
                "MASTER_PORT": port,
                "TORCHELASTIC_USE_AGENT_STORE": "True",
            }
        )
        for r in range(local)
    ]


def check(workers: list[Any], per_host: int, first_host: str) -> None:
    assert all(isinstance(w, LaunchEnv) for w in workers)
    assert [w.rank for w in workers] == list(range(len(workers)))
    assert [w.local_rank for w in workers] == [r % per_host for r in range(len(workers))]
    assert {(w.workers, w.local_workers, w.host) for w in workers} == {(len(workers), per_host, first_host)}
    assert len({w.port for w in workers}) == 1
