"""This worker's place among all workers, as the environment of its launcher says. Imports no torch."""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from distflow.errors import ConfigError, cut

# Set by `distflow run` for its workers: the file in which they meet. That launcher also reports why the run failed, so
# its workers need not.
LAUNCHER_STORE = "DISTFLOW_LAUNCHER_STORE"
MASTER_PORT = "DISTFLOW_MASTER_PORT"  # instead of the port derived from the Slurm job
SLURM_PORTS = range(15_000, 30_000)  # below the ports that Linux gives to outgoing connections


@dataclass(frozen=True)
class LaunchEnv:
    """This worker's identity, and the address of the store in which all workers meet."""

    rank: int
    workers: int
    local_rank: int
    local_workers: int | None  # None: the launcher does not say
    host: str
    port: int
    hosts_store: bool  # rank 0 opens the store itself; else the launcher has
    launcher: str  # what to name in messages: distflow, torchrun or Slurm
    attempt: str = "0"  # separates the keys of attempts that share a store
    store_file: str = ""  # where all workers are on one host: the store is this file, and nothing listens

    @property
    def store_address(self) -> str:
        """Returns the address of the store, for messages."""
        return self.store_file or f"{self.host}:{self.port}"

    def export(self, environ: dict[str, str] | os._Environ[str] = os.environ) -> None:
        """Sets the standard variables where they are not, for libraries that read them."""
        for name, value in (
            ("RANK", self.rank),
            ("WORLD_SIZE", self.workers),
            ("LOCAL_RANK", self.local_rank),
            ("MASTER_ADDR", self.host),
            ("MASTER_PORT", self.port),
        ):
            environ.setdefault(name, str(value))


def read_launch_env(environ: Mapping[str, str] = os.environ) -> LaunchEnv | None:
    """Returns the place that a launcher gave this process; None if it is no worker but to launch them."""
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return _torchrun(environ)
    # A batch script is in no step, and a shell on a compute node in one of a single task: there, `distflow run`
    # launches the workers as anywhere else.
    if "SLURM_STEP_ID" in environ and _slurm_tasks(environ) > 1:
        return _slurm(environ)
    return None


def _torchrun(environ: Mapping[str, str]) -> LaunchEnv:
    """Reads the variables of our own launcher, or the standard ones: torchrun, Kubernetes operators."""
    rank, workers = _integer(environ, "RANK"), _integer(environ, "WORLD_SIZE")
    if not 0 <= rank < workers:
        raise ConfigError(f"RANK is {rank} and WORLD_SIZE {workers}; a rank is one of 0 to WORLD_SIZE - 1")
    local_workers = _integer(environ, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in environ else None
    attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    common = (rank, workers, _integer(environ, "LOCAL_RANK", "0"), local_workers)
    if LAUNCHER_STORE in environ:
        return LaunchEnv(*common, "127.0.0.1", 0, False, "distflow", attempt, environ[LAUNCHER_STORE])
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]
    if missing and workers > 1:
        raise ConfigError(
            f"RANK and WORLD_SIZE are set, but not {' and '.join(missing)}: start the workers with torchrun or srun, or"
            " set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port there"
        )
    agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    host, port = environ.get("MASTER_ADDR") or "localhost", _port(environ, "MASTER_PORT", "0")
    # The agent's store outlives its workers; one of rank 0 is new in every attempt.
    return LaunchEnv(*common, host, port, not agent, "torchrun", attempt if agent else "0")


def _slurm(environ: Mapping[str, str]) -> LaunchEnv:
    """Reads the variables of a task that `srun` has started."""
    rank, workers = _integer(environ, "SLURM_PROCID"), _slurm_tasks(environ)
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    host = environ.get("MASTER_ADDR")
    if not host and not nodes:
        raise ConfigError("Slurm gives no node list (SLURM_STEP_NODELIST); set MASTER_ADDR to the host of rank 0")
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE")
    return LaunchEnv(
        rank,
        workers,
        _integer(environ, "SLURM_LOCALID", "0"),
        expand_tasks(tasks)[_integer(environ, "SLURM_NODEID", "0")] if tasks else None,
        # Not SLURM_LAUNCH_NODE_IPADDR, which is where srun was called.
        host or expand_hostlist(str(nodes))[0],
        _slurm_port(environ),
        True,
        "Slurm",
    )


def _slurm_tasks(environ: Mapping[str, str]) -> int:
    return _integer(environ, "SLURM_STEP_NUM_TASKS", environ.get("SLURM_NTASKS") or "1")


def _slurm_port(environ: Mapping[str, str]) -> int:
    for name in (MASTER_PORT, "MASTER_PORT"):
        if environ.get(name):
            return _port(environ, name)
    job, step = _integer(environ, "SLURM_JOB_ID", "0"), _integer(environ, "SLURM_STEP_ID", "0")
    return SLURM_PORTS[(31 * job + step) % len(SLURM_PORTS)]


def expand_hostlist(text: str) -> list[str]:
    """Expands Slurm's list of hosts: `node[01-03,7],x` are node01, node02, node03, node7 and x."""
    return [host for part in _split_outside_brackets(text) for host in _expand(part, text)]


def expand_tasks(text: str) -> list[int]:
    """Expands Slurm's tasks per node: `2(x3),1` are 2, 2, 2 and 1."""
    counts: list[int] = []
    for part in text.split(","):
        m = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if not m:
            raise ConfigError(f"'{cut(text)}' is not a list of tasks per node such as '2(x3),1'")
        counts += [int(m[1])] * int(m[2] or 1)
    return counts


def _split_outside_brackets(text: str) -> Iterator[str]:
    yield from (m for m in re.findall(r"(?:[^,\[\]]|\[[^\]]*\]?|\])+", text.strip()) if m)


def _expand(part: str, text: str) -> Iterator[str]:
    m = re.fullmatch(r"([^\[\]]*)(?:\[([^\[\]]+)\](.*))?", part)
    if not m:
        raise ConfigError(f"'{cut(text)}' is not a list of hosts such as 'node[01-03,7],x'; set MASTER_ADDR instead")
    head, ranges, rest = m[1], m[2], m[3]
    if ranges is None:
        yield head
        return
    for item in ranges.split(","):
        first, dash, last = item.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ConfigError(f"'{cut(text)}': '{cut(item)}' is not a range of hosts; set MASTER_ADDR instead")
        for n in range(int(first), int(last or first) + 1):
            for tail in _expand(rest, text):
                yield f"{head}{n:0{len(first)}d}{tail}"


def _port(environ: Mapping[str, str], name: str, default: str | None = None) -> int:
    port = _integer(environ, name, default)
    if not 0 <= port < 1 << 16:
        raise ConfigError(f"{name} in the environment is {port}; a port is at most 65535")
    return port


def _integer(environ: Mapping[str, str], name: str, default: str | None = None) -> int:
    text = environ.get(name) or default
    if text is None:
        raise ConfigError(f"{name} is not in the environment, although other variables of the launcher are; set it")
    try:
        return int(text)
    except ValueError:
        raise ConfigError(
            f"{name} in the environment is '{cut(text)}', which is not a number; set or unset it"
        ) from None
