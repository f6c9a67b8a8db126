"""The rendezvous of workers: opens the store, waits for the others, and names the missing ones instead of hanging."""

import contextlib
import errno
import json
import logging
import os
import secrets
import socket
import time
from datetime import timedelta
from typing import NoReturn

import torch.distributed as dist

from distflow.cluster.interface import export_interface, is_loopback, own_address
from distflow.cluster.launch_env import LaunchEnv
from distflow.errors import ConfigError, PeerLostError
from distflow.plan.layout import format_ranks

logger = logging.getLogger(__name__)
START_LIMIT = "DISTFLOW_START_LIMIT_S"  # environment variable: how long workers wait until all have joined
START_LIMIT_S = 300.0
FIRST_WARNING_S = 20.0
LINGER_S = 1.0  # for which the store of a start that failed should remain, so that others learn why
GRACE_S = 10.0  # by which other ranks wait longer than rank 0, whose report says who is missing
SHARED_STORE_CURE = "if torchrun has restarted them, set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun"


class Rendezvous:
    """The store of all workers, and this worker's address.

    Every worker opens it, publishes what others must know of it, and then waits for all:

        rendezvous = Rendezvous(env, timeout)
        rendezvous.publish("heartbeat", "10.0.0.1:4711")
        rendezvous.wait_for_all()
        rendezvous.lookup("heartbeat", 3)

    `store` serves process groups and the transport. `token` is a secret of this run.
    """

    def __init__(self, env: LaunchEnv, timeout: timedelta) -> None:
        self.env, self.rank, self.workers = env, env.rank, env.workers
        self.start = time.monotonic()
        self.limit_s = _start_limit()
        self.host = socket.gethostname()
        if is_loopback(env.host) and env.local_workers is not None and env.local_workers < env.workers:
            raise ConfigError(
                f"{self._self()}: {env.local_workers} of {env.workers} workers are on this host, but all are to meet"
                f" at {env.host}, which is every host itself: each would form a world of its own; {_set_master(env)}"
            )
        self._warn_at = self.start + FIRST_WARNING_S
        self.store: dist.Store = dist.PrefixStore(f"distflow/{env.attempt}", self._open(timeout))
        several_hosts = env.local_workers is None or env.local_workers < env.workers
        self.address = own_address(env.host, several_hosts)
        export_interface(self.address)
        self.token = ""  # known once all have joined

    def publish(self, name: str, value: str) -> None:
        """Makes a value of this worker known to the others, under `<name>/<rank>`."""
        self.store.set(f"{name}/{self.rank}", value)

    def lookup(self, name: str, rank: int) -> str:
        """Returns what another worker has published."""
        return bytes(self.store.get(f"{name}/{rank}")).decode()

    def wait_for_all(self) -> None:
        """Returns once all workers are here. Raises if one has failed before, or does not come within the limit."""
        pause_s = 0.002
        try:
            if self._register() == self.workers:
                self.store.compare_set("complete", "", "yes")
            while not self.store.check(["complete"]):
                self._check_time()
                time.sleep(pause_s)
                pause_s = min(0.25, pause_s * 1.2)
            verdict = self.lookup_key("complete")
            self.token = self.lookup_key("token")
        except dist.DistError as e:
            raise PeerLostError(
                f"{self._self()} lost the store at {self.env.store_address} while it waited for the others:"
                f" {self._owner()} has ended; its own report says why"
            ) from e
        if verdict != "yes":
            raise PeerLostError(f"{self._self()} ends, as another worker could not start: {verdict}")

    def fail(self, message: str) -> None:
        """Tells the waiting workers why this one will not join."""
        with contextlib.suppress(dist.DistError):
            self.store.compare_set("complete", "", f"{self._self()}: {message}"[:2000])

    def lookup_key(self, key: str) -> str:
        return bytes(self.store.get(key)).decode()

    def _register(self) -> int:
        """Counts this worker in; returns how many have joined. Refuses a rank that is taken, and a full world."""
        env, store = self.env, self.store
        if store.add(f"taken/{env.rank}", 1) > 1:
            other = json.loads(self.lookup("place", env.rank))
            where = f"{other['host']} (pid {other['pid']})"
            joined = store.add("joined", 0)
            if joined >= env.workers:
                self._refuse(
                    f"the {env.workers} workers that meet at {env.store_address} are complete, and rank {env.rank} is"
                    f" already on {where}: this run was started twice, or another one uses the port; {_set_port(env)}"
                )
            self._refuse(
                f"another worker has rank {env.rank}, on {where}: {joined} of {env.workers} workers have joined at"
                f" {env.store_address}; give each a RANK of its own, or {_set_port(env)} if that is another run"
            )
        self.publish("place", json.dumps({"host": self.host, "pid": os.getpid(), "workers": env.workers}))
        if env.rank == 0:
            store.set("token", secrets.token_hex(8))
        workers = int(bytes(store.compare_set("workers", "", str(env.workers))))
        if workers != env.workers:
            self._refuse(
                f"this worker is one of {env.workers}, but others that meet at {env.store_address} of {workers};"
                f" start all with the same number of workers, or {_set_port(env)} if those are another run"
            )
        return store.add("joined", 1)

    def _refuse(self, message: str) -> NoReturn:
        cure = f"; {SHARED_STORE_CURE}" if self.env.launcher == "torchrun" and not self.env.hosts_store else ""
        raise ConfigError(f"{self._self()}: {message}{cure}")

    def _check_time(self) -> None:
        now = time.monotonic()
        if self.rank == 0 and now > self._warn_at:
            logger.warning("%s", self._missing())
            self._warn_at = now + 60
        if now - self.start > self.limit_s + (GRACE_S if self.rank else 0):
            cure = f"start the missing ones, or raise {START_LIMIT} if they take longer"
            if is_loopback(self.env.host) and not self.env.store_file:
                cure = f"{self.env.host} is every host itself: {_set_master(self.env)}"
            elif self.env.launcher == "torchrun" and not self.env.hosts_store and self.env.attempt != "0":
                cure = SHARED_STORE_CURE
            raise ConfigError(f"{self._missing()} for {self.limit_s:g} s; {cure}")

    def _missing(self) -> str:
        """Lists the workers that have joined and the missing ranks. Costs a request per worker: only for reports."""
        here = [r for r in range(self.workers) if self.store.check([f"place/{r}"])]
        hosts = sorted({json.loads(self.lookup("place", r))["host"] for r in here})
        missing = tuple(r for r in range(self.workers) if r not in set(here))
        shown = ", ".join(hosts[:8]) + (f" and {len(hosts) - 8} more" if len(hosts) > 8 else "")
        return (
            f"{len(here)} of {self.workers} workers have joined at {self.env.store_address}, on {shown};"
            f" {self._self()} waits for ranks {format_ranks(missing) or 'none'}"
        )

    def _open(self, timeout: timedelta) -> dist.Store:
        env = self.env
        if env.workers == 1:
            return dist.HashStore()
        if env.store_file:
            store = dist.FileStore(env.store_file)
            store.set_timeout(timeout)
            return store
        if env.hosts_store and env.rank == 0:
            return self._listen(timeout)
        self._reach()
        try:
            return dist.TCPStore(env.host, env.port, is_master=False, wait_for_workers=False, timeout=timeout)
        except dist.DistError as e:
            raise ConfigError(
                f"{self._self()}: what listens at {env.host}:{env.port} is not the store of these workers: {e};"
                f" {_set_port(env)}"
            ) from e

    def _listen(self, timeout: timedelta) -> dist.Store:
        env = self.env
        try:
            dual = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if dual else socket.AF_INET
            listener = socket.create_server(("", env.port), family=family, dualstack_ipv6=dual, backlog=4096)
        except OSError as e:
            reason = "is taken: another run, or this one started twice" if e.errno == errno.EADDRINUSE else e.strerror
            raise ConfigError(
                f"{self._self()}: port {env.port}, where the workers are to meet, {reason}; {_set_port(env)}"
            ) from None
        with listener:
            fd = os.dup(listener.fileno())
        # Rank 0 itself need not be able to reach the address under which others know it.
        return dist.TCPStore(
            "127.0.0.1", env.port, is_master=True, wait_for_workers=False, master_listen_fd=fd, timeout=timeout
        )

    def _reach(self) -> None:
        """Returns once something listens at the store's address."""
        env, pause_s = self.env, 0.02
        while True:
            try:
                socket.create_connection((env.host, env.port), timeout=5).close()
                return
            except OSError as e:
                problem = self._unreachable(e)
            now = time.monotonic()
            if now > self._warn_at:
                logger.warning("%s; still trying", problem)
                self._warn_at = now + 60
            if now - self.start > self.limit_s:
                raise ConfigError(f"{problem}; it has tried for {self.limit_s:g} s")
            time.sleep(pause_s)
            pause_s = min(0.5, pause_s * 1.3)

    def _unreachable(self, error: OSError) -> str:
        env = self.env
        start = f"{self._self()} cannot join the other {env.workers - 1} workers: "
        if isinstance(error, socket.gaierror):
            return (
                f"{start}the host of rank 0, '{env.host}', does not resolve here: {error.strerror}; {_set_master(env)}"
            )
        if isinstance(error, ConnectionRefusedError):
            cure = _set_master(env) if is_loopback(env.host) else "see why rank 0 does not start, or check the port"
            return f"{start}nothing listens at {env.host}:{env.port}, where rank 0 should; {cure}"
        reason = "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
        return (
            f"{start}{env.host}:{env.port}, where rank 0 should be, cannot be reached: {reason}; check the network and"
            f" the firewall between {self.host} and it, or {_set_master(env)}"
        )

    def _self(self) -> str:
        return f"rank {self.rank} on {self.host}"

    def _owner(self) -> str:
        return "rank 0" if self.env.hosts_store else "the launcher"


def _start_limit() -> float:
    text = os.environ.get(START_LIMIT) or str(START_LIMIT_S)
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{START_LIMIT} in the environment is '{text}', which is not a number of seconds") from None


def _set_master(env: LaunchEnv) -> str:
    how = "--master-addr of torchrun" if env.launcher == "torchrun" and not env.hosts_store else "MASTER_ADDR"
    return f"set {how} on all hosts to an address of rank 0's host that all can reach"


def _set_port(env: LaunchEnv) -> str:
    name = "DISTFLOW_MASTER_PORT" if env.launcher == "Slurm" else "MASTER_PORT"
    return f"set {name} to a free port on all hosts"
