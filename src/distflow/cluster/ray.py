"""Starts the workers on a Ray cluster, watches them, and restarts them if that may help.

Ray places and starts; it carries no data, and this process is not on the path of any. A worker is the same process as
elsewhere, with the same variables: the child of an actor, each of which has a bundle of one placement group. Not Ray
Train: it gives all workers of a run the same resources, whereas a rank set here may ask for its own.
"""

import json
import logging
import os
import signal
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from distflow.cluster.ray_actor import ActorAddress, End, WorkerActor
from distflow.cluster.restarts import PRESS_AGAIN, run_with_restarts
from distflow.cluster.stop_request import StopRequest
from distflow.config import Config
from distflow.errors import ConfigError, cut, suggest
from distflow.liveness.failures import Exit, Failure, find_cause
from distflow.liveness.heartbeat import LAUNCHER_FOLDER
from distflow.plan import format_ranks
from distflow.plan.placement import ALL, Placement
from distflow.util.extras import how_to_install
from distflow.util.owner import OWNER

try:
    import ray
    from ray.exceptions import RayActorError
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError as e:
    raise ConfigError(f"--launcher ray: Ray is not installed ({e}); {how_to_install('ray')}") from None

logger = logging.getLogger(__name__)
GRACE_S = 10.0  # in which the others notice that a worker has failed, and report it
Resources = Mapping[str, float]


def launch(config: Config, words: Sequence[str], resume: str | None, again: Sequence[str], address: str) -> int:
    """Runs the config to the end on the cluster at `address`, by default the one that Ray finds; returns the exit code.

    `words` after `distflow` start a worker; the words of `again` start the run again.
    """
    workers = config.workers or 1
    check_resources(config, workers)
    _connect(address)
    command = ["-u", "-m", "distflow", *words, f"workers={workers}"]
    stop = StopRequest()
    launcher = _Launcher(config, resources_by_rank(config, workers, ray.cluster_resources()), command, stop)
    try:
        with stop.handling():  # instead of Ray's own handlers
            return run_with_restarts(config, launcher.run_workers, stop, resume, again)
    finally:
        ray.shutdown()


class _Launcher:
    def __init__(
        self, config: Config, resources: Sequence[Resources], command: Sequence[str], stop: StopRequest
    ) -> None:
        self.config, self.resources, self.command, self.stop = config, resources, command, stop

    def run_workers(self, resume: str | None, owner: str) -> Failure | None:
        """Runs all workers until they end; returns why, if they failed."""
        with self._actors() as (actors, places):
            if not actors:
                return Failure("stopped", "")
            _describe(places)
            local = Counter[str]()
            running = {}
            for rank, (actor, place) in enumerate(zip(actors, places, strict=True)):
                env = {
                    "RANK": str(rank),
                    "WORLD_SIZE": str(len(actors)),
                    "LOCAL_RANK": str(local[place.node]),
                    "MASTER_ADDR": places[0].address,
                    "MASTER_PORT": str(places[0].port),
                }
                env |= {name: value for name, value in os.environ.items() if name.startswith("DISTFLOW_")}
                env[OWNER] = owner
                local[place.node] += 1
                command = [*self.command, *([f"--resume={resume}"] if resume else [])]
                running[actor.run.remote(command, LAUNCHER_FOLDER, env, os.getcwd())] = rank
            ends = self._watch(running, actors)
        return Failure("stopped", "") if self.stop.at_once else _cause(ends, places)

    def _watch(self, running: dict[Any, int], actors: Sequence[Any]) -> dict[int, End | None]:
        """Returns how each worker has ended, None if its node is lost. Workers that had to be ended are left out."""
        ends: dict[int, End | None] = {}
        deadline, asked = float("inf"), False
        while running and time.monotonic() < deadline and not self.stop.at_once:
            ready, _ = ray.wait(list(running), timeout=0.5)
            for result in ready:
                rank = running.pop(result)
                try:
                    ends[rank] = _by_own_clock(ray.get(result))
                except RayActorError:
                    ends[rank] = None
            if deadline == float("inf") and any(end is None or end.exitcode for end in ends.values()):
                deadline = time.monotonic() + GRACE_S
            if self.stop.is_requested() and not asked:
                asked = True
                if self.stop.signal == signal.SIGINT:
                    logger.warning(PRESS_AGAIN)
                for actor in actors:
                    actor.stop.remote()
        return ends

    @contextmanager
    def _actors(self) -> Iterator[tuple[list[Any], list[ActorAddress]]]:
        """Starts an actor for each rank, none if the run is to stop before, and ends them all."""
        deadline = time.monotonic() + self.config.ray.start_limit_s
        self._next_warning = time.monotonic() + 10
        while not self.stop.is_requested():
            group = placement_group([dict(r) for r in self.resources], strategy=self.config.ray.strategy)
            actors: list[Any] = []
            try:
                while not group.wait(1) and not self.stop.is_requested():
                    self._check(deadline)
                if self.stop.is_requested():
                    break
                actors = [_start_actor(group, bundle, r) for bundle, r in enumerate(self.resources)]
                requests = [actor.place.remote() for actor in actors]
                while len(ray.wait(requests, num_returns=len(requests), timeout=1)[0]) < len(requests):
                    self._check(deadline)
                    if self.stop.is_requested():
                        break
                if self.stop.is_requested():
                    break
                try:
                    places = ray.get(requests)
                except RayActorError:  # on a node that Ray did not yet know to be lost
                    self._check(deadline)
                    continue
                order = assign_ranks(self.resources, [place.node for place in places])
                yield [actors[b] for b in order], [places[b] for b in order]
                return
            finally:
                for actor in actors:
                    ray.kill(actor)
                remove_placement_group(group)
        yield [], []

    def _check(self, deadline: float) -> None:
        """Raises if the workers could not be started in time."""
        now = time.monotonic()
        if now > deadline:
            raise ConfigError(
                f"the workers could not be placed on the cluster within {self.config.ray.start_limit_s:g} s:"
                f" {_needed(self.resources)}; add nodes, ask for less (ray.resources, workers), or raise"
                " ray.start_limit_s"
            )
        if now > self._next_warning:
            logger.warning("waiting for the cluster: %s", _needed(self.resources))
            self._next_warning = now + 60


def _connect(address: str) -> None:
    if address and address.startswith("ray://"):
        raise ConfigError(f"--address {address}: use `ray job submit`, or give host:port of the cluster's head")
    if address and address != "auto":
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
        except (OSError, ValueError) as e:
            raise ConfigError(f"--address {address}: no Ray cluster can be reached there: {e}") from None
    try:
        ray.init(address=address or "auto", logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError, ValueError) as e:
        raise ConfigError(
            f"no Ray cluster: {cut(str(e), 300)}; start one with `ray start --head`, or give --address HOST:PORT"
        ) from None


def check_resources(config: Config, workers: int) -> None:
    """Raises if `ray.resources` names a rank set that is not there."""
    names = Placement(workers, config.placement.ranks).ranks
    for name in config.ray.resources:
        if name not in names:
            raise ConfigError(f"ray.resources: unknown rank set '{cut(name)}'{suggest(name, names)}")


def resources_by_rank(config: Config, workers: int, cluster: Resources) -> list[Resources]:
    """Returns the resources of each rank: the most that any of its rank sets asks for; else a GPU, or a CPU."""
    default = {"GPU": 1.0} if cluster.get("GPU") else {"CPU": 1.0}
    asked = config.ray.resources
    ranks = Placement(workers, config.placement.ranks).ranks
    needs: list[Resources] = []
    for rank in range(workers):
        own: dict[str, float] = {}
        for name in (ALL, *config.placement.ranks):
            if rank in ranks[name]:
                for kind, amount in asked.get(name, {}).items():
                    own[kind] = max(amount, own.get(kind, 0.0))
        needs.append(own or default)
    return needs


def assign_ranks(resources: Sequence[Resources], nodes: Sequence[str]) -> list[int]:
    """Returns the bundle of each rank. Workers with the same needs are interchangeable: ranks of a node shall be
    consecutive, as tensor parallelism and the weight sync prefer."""
    first = {node: bundle for bundle, node in reversed(list(enumerate(nodes)))}
    kinds = [tuple(sorted(r.items())) for r in resources]
    free = {
        kind: sorted((b for b, k in enumerate(kinds) if k == kind), key=lambda b: (first[nodes[b]], b))
        for kind in set(kinds)
    }
    return [free[kind].pop(0) for kind in kinds]


def _start_actor(group: Any, bundle: int, resources: Resources) -> Any:
    others = {kind: amount for kind, amount in resources.items() if kind not in ("CPU", "GPU", "memory")}
    return (
        ray.remote(WorkerActor)
        .options(
            num_cpus=resources.get("CPU", 0),
            num_gpus=resources.get("GPU", 0),
            memory=resources.get("memory"),
            resources=others,
            max_concurrency=2,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, bundle),
        )
        .remote()
    )


def _needed(resources: Sequence[Resources]) -> str:
    total = Counter[str]()
    for need in resources:
        total.update(need)
    present = ray.cluster_resources()
    amounts = (f"{amount:g} {kind} of {present.get(kind, 0):g}" for kind, amount in total.items())
    return f"{len(resources)} workers need {', '.join(amounts)}"


def _describe(places: Sequence[ActorAddress]) -> None:
    ranks: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        ranks.setdefault(f"{place.host} ({place.address})", []).append(rank)
    logger.info("workers: %s", "; ".join(f"ranks {format_ranks(tuple(r))} on {h}" for h, r in ranks.items()))


def _by_own_clock(end: End) -> End:
    """Moves the times of failures from the clock of another host to that of this one."""
    later_s, files = time.monotonic() - end.at, dict(end.files)
    for name, content in files.items():
        if name.endswith(".error"):
            failure = json.loads(content)
            files[name] = json.dumps(failure | {"time": failure["time"] + later_s}).encode()
    return replace(end, files=files)


def _cause(ends: Mapping[int, End | None], places: Sequence[ActorAddress]) -> Failure | None:
    """Returns why the run failed; None if all workers have ended well."""
    known = {rank: end for rank, end in ends.items() if end is not None}
    if len(known) == len(places) and not any(end.exitcode for end in known.values()):
        return None
    exits = {r: Exit(r, end.exitcode, end.pid) for r, end in known.items() if end.exitcode}
    with tempfile.TemporaryDirectory() as folder:
        for end in known.values():
            for name, content in end.files.items():
                (Path(folder) / name).write_bytes(content)
        reported = find_cause(Path(folder), exits) if exits else None
    lost = [rank for rank in ends if rank not in known]
    if not lost or (reported is not None and reported.kind not in ("peer_lost", "died", "stuck")):
        assert reported is not None
        return reported
    hosts = sorted({f"{places[r].host} ({places[r].address})" for r in lost})
    noticed = f"\n  noticed by rank {reported.rank}: {reported.message}" if reported and reported.rank >= 0 else ""
    return Failure("died", f"ranks {format_ranks(tuple(sorted(lost)))} are lost, with {', '.join(hosts)}{noticed}")
