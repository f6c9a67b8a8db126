"""The place of a worker, from the variables of its launcher."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distflow.cluster.launch_env import SLURM_PORTS, LaunchEnv, expand_hostlist, expand_tasks, read_launch_env
from distflow.errors import ConfigError

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "a",
    "MASTER_PORT": "29500",
}
SRUN = {  # as Slurm 22.05 sets them for a task
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "5",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NODELIST": "node[01-09]",
    "SLURM_STEP_NODELIST": "node[02,04-05]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.99",
}


def test_torchrun_says_where_a_worker_is() -> None:
    assert read_launch_env(TORCHRUN) == LaunchEnv(3, 8, 1, 2, "a", 29500, True, "torchrun")
    agent = TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2"}
    assert read_launch_env(agent) == LaunchEnv(3, 8, 1, 2, "a", 29500, False, "torchrun", "2")
    ours = TORCHRUN | {"DISTFLOW_LAUNCHER_STORE": "/shm/store"}
    assert read_launch_env(ours) == LaunchEnv(3, 8, 1, 2, "127.0.0.1", 0, False, "distflow", store_file="/shm/store")


def test_a_task_of_srun_is_a_worker() -> None:
    env = read_launch_env(SRUN)
    assert env is not None
    assert (env.rank, env.workers, env.local_rank, env.local_workers) == (3, 5, 1, 2)
    assert (env.host, env.hosts_store) == ("node02", True)  # the first host of the step, not where srun was called
    assert env.port == SLURM_PORTS[31 * 7 + 2]
    assert read_launch_env(SRUN | {"SLURM_PROCID": "0"}).port == env.port  # type: ignore[union-attr]
    assert read_launch_env(SRUN | {"SLURM_STEP_ID": "3"}).port != env.port  # type: ignore[union-attr]
    assert read_launch_env(SRUN | {"MASTER_PORT": "4000"}).port == 4000  # type: ignore[union-attr]
    assert read_launch_env(SRUN | {"MASTER_PORT": "4000", "DISTFLOW_MASTER_PORT": "5"}).port == 5  # type: ignore[union-attr]
    assert read_launch_env(SRUN | {"MASTER_ADDR": "10.1.1.1"}).host == "10.1.1.1"  # type: ignore[union-attr]
    exported: dict[str, str] = {"MASTER_PORT": "1"}
    env.export(exported)
    assert exported == {
        "RANK": "3",
        "WORLD_SIZE": "5",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "node02",
        "MASTER_PORT": "1",
    }


def test_torchrun_within_srun_comes_first() -> None:
    env = read_launch_env(SRUN | TORCHRUN)
    assert env is not None
    assert (env.launcher, env.workers) == ("torchrun", 8)


def test_a_batch_script_and_a_shell_on_a_node_launch_workers() -> None:
    assert read_launch_env({}) is None
    assert read_launch_env({k: v for k, v in SRUN.items() if "STEP" not in k}) is None  # in `sbatch`
    assert read_launch_env(SRUN | {"SLURM_STEP_NUM_TASKS": "1"}) is None  # in `srun --pty bash`


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (TORCHRUN | {"RANK": "x"}, "RANK in the environment is 'x', which is not a number"),
        (TORCHRUN | {"RANK": "8"}, "RANK is 8 and WORLD_SIZE 8"),
        (TORCHRUN | {"MASTER_ADDR": ""}, "but not MASTER_ADDR: start the workers with torchrun or srun"),
        (TORCHRUN | {"MASTER_PORT": "70000"}, "MASTER_PORT in the environment is 70000; a port is at most 65535"),
        (SRUN | {"SLURM_PROCID": ""}, "SLURM_PROCID is not in the environment"),
        (SRUN | {"SLURM_STEP_NODELIST": "node[x]"}, "'x' is not a range of hosts; set MASTER_ADDR instead"),
        (SRUN | {"SLURM_STEP_NODELIST": "node[1"}, "is not a list of hosts such as"),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "two"}, "is not a list of tasks per node"),
    ],
)
def test_what_cannot_be_is_refused(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("[", r"\[")):
        read_launch_env(environ)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node[01-03,7],x", ["node01", "node02", "node03", "node7", "x"]),
        ("a", ["a"]),
        ("a-1.b.c,d", ["a-1.b.c", "d"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("r[1-2]n[01-02]-ib", ["r1n01-ib", "r1n02-ib", "r2n01-ib", "r2n02-ib"]),
        ("c[2,1]", ["c2", "c1"]),  # an arbitrary distribution keeps its order
    ],
)
def test_lists_of_hosts_are_expanded(text: str, hosts: list[str]) -> None:
    assert expand_hostlist(text) == hosts


@given(st.lists(st.integers(0, 2000), min_size=1, max_size=20, unique=True), st.integers(1, 5))
def test_any_list_of_hosts_is_expanded(numbers: list[int], width: int) -> None:
    hosts = [f"node{n:0{width}d}" for n in numbers]
    bracketed = "node[" + ",".join(f"{n:0{width}d}" for n in numbers) + "]"
    assert expand_hostlist(bracketed) == expand_hostlist(",".join(hosts)) == hosts


def test_tasks_per_node_are_expanded() -> None:
    assert expand_tasks("2(x3),1") == [2, 2, 2, 1]
    assert expand_tasks("8") == [8]
