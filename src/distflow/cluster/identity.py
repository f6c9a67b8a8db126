"""Identifies each worker to all others at the start, so that one on a wrong host or with other code is named."""

import hashlib
import json
import os
import socket
import sys
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from distflow.config import Config
from distflow.errors import DistflowError
from distflow.flow.importing import loaded_files
from distflow.liveness.heartbeat import Peer
from distflow.plan import Layout, Plan, format_ranks
from distflow.plan.topology import Topology
from distflow.util.version import __version__

SIZE = 512  # bytes of a packed identity
SHOWN_HOSTS = 8  # in a message


@dataclass(frozen=True)
class Identity:
    host_id: str  # equal for workers that can share memory: the same kernel and network namespace
    host: str
    address: str
    pid: int
    pid_space: int  # equal for workers that see each other's processes
    distflow_version: str
    torch_version: str
    config: str
    plan: str
    code: str
    device: str  # its type
    device_count: int
    device_id: str  # equal for workers that would share one accelerator
    threads: int = 1  # of PyTorch; sums on a CPU may depend on it in their last bits

    @classmethod
    def own(cls, address: str, host_id: str, config: Config, plan: Plan, device: torch.device) -> "Identity":
        text = config.model_dump_json(exclude={"run_dir"})
        accelerated = device.type != "cpu"
        return cls(
            host_id=host_id[:80],
            host=socket.gethostname()[:64],
            address=address,
            pid=os.getpid(),
            pid_space=os.stat("/proc/self/ns/pid").st_ino if sys.platform == "linux" else 0,
            distflow_version=__version__[:24],
            torch_version=torch.__version__[:24],
            config=_short_hash(text.encode()),
            plan=plan.hash[:12],
            code=_code_hash(),
            device=device.type[:12],
            device_count=torch.accelerator.device_count() if accelerated else 0,
            device_id=_device_id(device) if accelerated else "",
            threads=torch.get_num_threads(),
        )

    def pack(self) -> bytes:
        data = json.dumps(list(asdict(self).values()), separators=(",", ":"), ensure_ascii=False).encode()
        assert len(data) <= SIZE, f"an identity of {len(data)} bytes"
        return data.ljust(SIZE)

    def peer(self, own: "Identity") -> Peer:
        """Returns where this worker is, as seen from `own`."""
        return Peer(self.host, self.pid, (self.host_id, self.pid_space) == (own.host_id, own.pid_space), self.address)

    @classmethod
    def unpack(cls, data: bytes) -> "Identity":
        return cls(*json.loads(data))


def check_identities(identities: Sequence[Identity]) -> None:
    """Raises one error, the same on all workers, unless all run the same thing on a device of their own."""
    for attribute, problem, cure in (
        ("distflow_version", "run different versions of DistFlow", "install the same one on all hosts"),
        ("torch_version", "run different versions of PyTorch", "install the same one on all hosts"),
        ("code", "run different code of DistFlow or of the config's own files", "copy the same files to all hosts"),
        ("config", "have different configs", "copy the same file to all hosts and give the same overrides"),
        (
            "plan",
            "derived different plans",
            "their data files differ: compare `distflow plan CONFIG --json` on those hosts",
        ),
        (
            "device",
            "have different devices",
            "see why a host has none (its driver, CUDA_VISIBLE_DEVICES, the resources it asked for), or hide those of"
            " the others to train on the CPU",
        ),
    ):
        if len({getattr(i, attribute) for i in identities}) > 1:
            raise DistflowError(f"the workers {problem}: {_by_value(identities, attribute)}; {cure}")
    devices: dict[tuple[str, str], int] = {}
    for rank, identity in enumerate(identities):
        place = (identity.host_id, identity.device_id)
        if identity.device_id and (other := devices.setdefault(place, rank)) != rank:
            raise DistflowError(
                f"ranks {other} and {rank} use the same {identity.device} device of {identity.host}, which shows"
                f" {identity.device_count}: start at most one worker per device, or give each a LOCAL_RANK of its own"
            )


def describe_hosts(identities: Sequence[Identity]) -> str:
    """Returns `4 workers on 2 hosts: a (10.0.0.1): ranks 0-1; b (10.0.0.2): ranks 2-3`, cut if there are many hosts."""
    hosts = _ranks_by(identities, "host_id")
    parts = []
    for ranks in hosts.values():
        first = identities[ranks[0]]
        word = "ranks" if len(ranks) > 1 else "rank"
        parts.append(f"{first.host} ({first.address}): {word} {format_ranks(tuple(ranks))}")
    if len(parts) > 2 * SHOWN_HOSTS:
        parts = [*parts[:SHOWN_HOSTS], f"… {len(parts) - SHOWN_HOSTS - 1} more …", parts[-1]]
    count = len(hosts)
    workers = "1 worker" if len(identities) == 1 else f"{len(identities)} workers"
    return f"{workers} on {count} host{'s' if count > 1 else ''}: {'; '.join(parts)}"


def list_hosts(identities: Sequence[Identity]) -> list[dict[str, str]]:
    """Returns each host with its address, device, ranks, and threads per worker."""
    hosts = []
    for ranks in _ranks_by(identities, "host_id").values():
        first = identities[ranks[0]]
        place = {"host": first.host, "address": first.address, "device": first.device}
        threads = ", ".join(map(str, thread_counts([identities[r] for r in ranks])))
        hosts.append(place | {"ranks": format_ranks(tuple(ranks)), "threads": threads})
    return hosts


def thread_counts(identities: Sequence[Identity]) -> list[int]:
    """Returns the numbers of threads that workers have, ascending."""
    return sorted({i.threads for i in identities})


def tensor_parallel_hint(layouts: Collection[Layout], identities: Sequence[Identity]) -> str | None:
    """Returns a warning if the ranks of a tensor parallel replica are on different hosts: they talk in every layer."""
    hosts = Topology.of([i.host_id for i in identities]).hosts
    for layout in layouts:
        for replica in layout.replicas:
            if (count := len({hosts[r] for r in replica})) > 1:
                names = ", ".join(list(dict.fromkeys(identities[r].host for r in replica))[:SHOWN_HOSTS])
                return (
                    f"tp {layout.tp}: ranks {format_ranks(replica)} are on {count} hosts ({names}) and talk in every"
                    " layer; choose a tp that divides the workers of a host, and number ranks host by host"
                )
    return None


def _by_value(identities: Sequence[Identity], attribute: str) -> str:
    """Lists the values of a field, each with its hosts and ranks."""
    parts = []
    for value, ranks in _ranks_by(identities, attribute).items():
        hosts = list(dict.fromkeys(identities[r].host for r in ranks))
        names = ", ".join(hosts[:SHOWN_HOSTS]) + (
            f" and {len(hosts) - SHOWN_HOSTS} more" if len(hosts) > SHOWN_HOSTS else ""
        )
        parts.append(f"ranks {format_ranks(tuple(ranks))} (on {names}) have {value}")
    return ", ".join(parts[:SHOWN_HOSTS]) + (", …" if len(parts) > SHOWN_HOSTS else "")


def _ranks_by(identities: Sequence[Identity], attribute: str) -> dict[str, list[int]]:
    ranks: dict[str, list[int]] = {}
    for rank, identity in enumerate(identities):
        ranks.setdefault(getattr(identity, attribute), []).append(rank)
    return ranks


def _device_id(device: torch.device) -> str:
    """Returns the serial number of the device, "" if it has none: its index would not do, as schedulers may show each
    worker a device of its own as number 0."""
    properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return str(getattr(properties, "uuid", ""))


def _code_hash() -> str:
    """Returns a hash of the package's source, and of the files that the config has named and loaded."""
    package = Path(__file__).parents[1]
    files = [(str(p.relative_to(package)), p) for p in package.rglob("*.py")] + [(p.name, p) for p in loaded_files()]
    digest = hashlib.sha256()
    for name, path in sorted(files):
        digest.update(name.encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _short_hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]
