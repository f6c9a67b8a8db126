"""A Slurm cluster of one node on this machine, from Debian's packages slurm-wlm and munge; needs root."""

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from limits import wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun")
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
KillWait=5
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=test Nodes={host} Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""


def why_not() -> str | None:
    """Returns why Slurm cannot be started here."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
    if missing:
        return f"needs {', '.join(missing)}: apt-get install slurm-wlm munge"
    return None if os.geteuid() == 0 else "Slurm's daemons need root"


@contextmanager
def slurm(folder: Path) -> Iterator[dict[str, str]]:
    """Starts the daemons; gives the environment in which `srun` finds them."""
    folder.mkdir(parents=True)
    for name in ("state", "spool"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    ports = [_free_port() for _ in range(2)]
    config = CONFIG.format(
        host=socket.gethostname(),
        folder=folder,
        controller_port=ports[0],
        node_port=ports[1],
        cpus=os.cpu_count(),
    )
    (folder / "slurm.conf").write_text(config)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
    environment |= {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": _path()}
    files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "log", "pid", "seed")]
    munged = ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *files]
    daemons: list[subprocess.Popen[bytes]] = []
    said = folder / "daemons.log"
    with open(said, "wb") as log:
        try:
            daemons.append(_start(munged, environment, log))
            wait_until((folder / "munge.socket").exists, state=said.read_text)
            daemons += [_start([name, "-D"], environment, log) for name in ("slurmctld", "slurmd")]
            wait_until(lambda: _is_idle(environment), state=said.read_text)
            yield environment
        finally:
            for daemon in reversed(daemons):
                daemon.terminate()
                try:
                    daemon.wait(10)
                except subprocess.TimeoutExpired:
                    daemon.kill()


def _start(command: Sequence[str], environment: dict[str, str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL)


def _is_idle(environment: dict[str, str]) -> bool:
    done = subprocess.run(["sinfo", "-h", "-o", "%T"], env=environment, capture_output=True, text=True, check=False)
    return done.stdout.strip() == "idle"


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
