"""Weak scaling of whole steps over hosts with shaped links, beside a single controller, verl and TransferQueue.

    python bench/scaling.py [--hosts 1 2 4 8 16 32] [--steps 5] [--rate 20mbit] [--peers DIR] [--json FILE] [--svg FILE]

Hosts are network namespaces, so this needs root. A host has two workers and the same share of the batch whatever their
number: 64 samples of 2,048 tokens on average, 24 bytes per token when they are generated and 36 when they are trained
on. A step is one of GRPO with the weight sync, moves with balance, and votes; compute is a sleep, either none or
81 : 10 to our data plane on four hosts, which is the ratio that was published for 32 GPUs; with compute, there is a
checkpoint after every step. On the same links, in the same run:
  every byte moves     workers that generate and workers that train are apart: all samples change their owner
  colocated            all workers do both: samples stay where they are unless balance needs them elsewhere
  controller           our own single controller: a driver on the first host, with our wire format and sockets
  verl                 its DataProto through a Ray driver, one actor on each host, with both of its serialisations
  TransferQueue        with a storage unit on each host
  bare link            the bytes of the busiest link, streamed from each host to the next
The controller and the peers move the samples only; their compute is added, as a driver waits for every call, and they
run fewer steps on more hosts, one from eight on: a step of theirs takes minutes there. So they end at 16 hosts, with
the faster of verl's serialisations. Links are counted by the interfaces. Peers are tried before anything else, so that
one that does not start is known at once. The last line is one JSON object; `--json` has it as far as it goes, always.
"""

import os

os.environ |= {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}  # a fork of a process with threads may hang

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from controller import can_limit_memory, memory_limit
from distflow.simulate import SimulatedStep, load_hardware
from links import Measured, bare, bytes_between, controlled, decentralised
from plot import Chart, svg
from predicted import bytes_per_s, predict
from ray_cluster import RAY_FOLDER, RayCluster
from steps import Work, weight_bytes
from workers import Hosts, why_not

PER_HOST = 2
WORK = Work(rows=32, tokens=2048, hidden=64, layers=2, save=False)
COMPUTE_RATIO, PUBLISHED_HOSTS = 81 / 10, 4  # measured by others on 32 GPUs: four hosts of eight
PEER_HOSTS = 16  # where a step of verl takes over three minutes; a Ray node with two actors takes 0.7 GB
TRY_S = 120  # in which a peer has to answer before all else
FITTED_HOSTS = 4  # up to which the simulator is calibrated
LIMIT_HOSTS, MEMORY_LIMIT, LARGEST = 16, 256 << 20, 4  # where the driver has so much memory, and batches to try
OURS = ("every byte moves", "colocated")
VERL = ("verl", "verl, numpy")
PEERS = (*VERL, "transferqueue")


class Scaling:
    """The rows of the table: by number of hosts, then by system."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.folder = args, folder
        self.work = replace(WORK, tokens=args.tokens)
        self.rows: dict[int, dict[str, Measured]] = {h: {} for h in args.hosts}
        self.compute_s = 0.0
        self.bare_s: dict[int, float] = {}
        self.survived: dict[str, Any] = {}
        self.version: str | None = None
        self.with_peers: list[str] = []  # those that start here
        self.left_out: list[str] = []  # what was not measured, and why
        self.began = time.monotonic()

    def decentralised(self, hosts: Hosts, work: Work, steps: int) -> Measured:
        with tempfile.TemporaryDirectory(dir=self.folder) as run:
            return decentralised(hosts, PER_HOST, work, steps, run)

    def calibrate(self) -> None:
        """Sets the compute of a step by our own data plane where that is published."""
        with Hosts(PUBLISHED_HOSTS, self.args.rate) as hosts:
            data_plane_s = self.decentralised(hosts, replace(self.work, split=True), self.args.steps).s
        self.compute_s = COMPUTE_RATIO * data_plane_s
        print(
            f"data plane on {PUBLISHED_HOSTS} hosts {data_plane_s:.2f} s, so compute {self.compute_s:.2f} s", flush=True
        )

    def on_hosts(self, n: int) -> None:
        """Measures our own steps and those of the controller on n hosts."""
        row, args = self.rows[n], self.args
        with Hosts(n, args.rate) as hosts:
            for name in OURS:
                work = replace(self.work, split=name == "every byte moves")
                row[name] = self.decentralised(hosts, work, args.steps)
                whole = replace(work, compute_s=self.compute_s, save=True)
                row[f"{name}, compute"] = self.decentralised(hosts, whole, self._few_with_compute())
            if n > 1:
                self.bare_s[n] = min(bare(hosts, int(row["every byte moves"].busiest)) for _ in range(3))
            if n == min(LIMIT_HOSTS, max(args.hosts)) and can_limit_memory():
                self._largest_batch(hosts, n)
            elif n <= LIMIT_HOSTS:  # beyond, a step takes minutes
                row["controller"] = controlled(hosts, PER_HOST, self.work, self._few(n))
            else:
                self.left_out.append(f"controller on {n} hosts: a step takes minutes")
        self._print(n, *OURS, "controller")
        self.write()

    def _few_with_compute(self) -> int:
        """Returns how many steps with compute: they differ by as much as those without, which is little of them."""
        return max(1, self.args.steps // 2)

    def _few(self, n: int) -> int:
        """Returns how many steps of a system are worth their time: those of a centre take longer with each host."""
        return max(1, min(self.args.steps, 8 // n))

    def _largest_batch(self, hosts: Hosts, n: int) -> None:
        """Doubles the batch until the driver is killed for its memory, then measures our own step at the last one."""
        factor, last = 1, None
        while factor <= LARGEST:
            work = replace(self.work, rows=factor * WORK.rows)
            with memory_limit(MEMORY_LIMIT) as (cgroup, killed):
                try:
                    last = controlled(hosts, PER_HOST, work, 1, cgroup)
                except AssertionError:
                    if not killed():
                        raise
                    break
            self.rows[n].setdefault("controller", last)
            factor *= 2
        if last is None:
            self.survived = {"hosts": n, "batch": None, "killed_at": WORK.rows * n * PER_HOST}
            return
        rows = factor // 2 * WORK.rows
        compute_s = self.compute_s * factor / 2
        work = replace(self.work, split=True, rows=rows, compute_s=compute_s, save=True)
        ours = self.rows[n]["every byte moves, compute"]
        if factor > 2:
            ours = self.decentralised(hosts, work, 2)
        self.survived = {
            "hosts": n,
            "memory_limit_mib": MEMORY_LIMIT >> 20,
            "batch": rows * n * PER_HOST,
            "killed_at": 2 * rows * n * PER_HOST if factor <= LARGEST else None,
            "controller_s": round(last.s + compute_s, 3),
            "ours_s": round(ours.s, 3),
            "speedup": round((last.s + compute_s) / ours.s, 2),
        }

    def try_peers(self, python: Path) -> None:
        """Finds the peers that make a small step on two hosts; says of the others what their last words were.

        A cluster that fails is started anew, with the next peer first, so that one does not bar the others.
        """
        left, reason = [*PEERS], ""
        for _ in range(1 + len(PEERS)):
            try:
                with Hosts(2, self.args.rate, private=[RAY_FOLDER]) as hosts:
                    cluster = RayCluster(hosts, python, self.folder / "peers.log", TRY_S)
                    cluster.grow(2)
                    while left:
                        cluster.ask(system=left[0], hosts=2, rows=4, tokens=16, steps=1)
                        self.with_peers.append(left.pop(0))
                    print(f"peers start: {cluster.version}", flush=True)
                    return
            except (RuntimeError, AssertionError, OSError) as e:
                reason = str(e)
                print(f"{left[0]} does not start: {reason}", file=sys.stderr, flush=True)
                left.append(left.pop(0))
        self.left_out += [f"{peer}: {reason}" for peer in left]

    def peers(self, python: Path) -> None:
        """Measures the peers in one Ray cluster, which grows."""
        sizes = [h for h in self.args.hosts if 1 < h <= PEER_HOSTS]
        self.left_out += [f"peers on {h} hosts: a step takes minutes" for h in self.args.hosts if h > PEER_HOSTS]
        with Hosts(max(sizes), self.args.rate, private=[RAY_FOLDER]) as hosts:
            cluster = RayCluster(hosts, python, self.folder / "peers.log", self.args.peer_timeout)
            self.version = cluster.version
            for n in sizes:
                cluster.grow(n)
                for system in self._peers_on(n):
                    before, steps = [h.traffic() for h in hosts], self._few(n)
                    size = {"rows": PER_HOST * WORK.rows, "tokens": self.work.tokens, "steps": steps}
                    seconds = cluster.ask(system=system, hosts=n, **size)
                    self.rows[n][system] = Measured(seconds, bytes_between(before, hosts, steps)[:n])
                    self._print(n, system)
                    self.write()

    def _peers_on(self, n: int) -> list[str]:
        """Returns the peers to measure: where a step takes minutes, only the faster of verl's serialisations."""
        before = self.rows.get(n // 2, {})
        if n < PEER_HOSTS or not before.keys() >= {*VERL}:
            return self.with_peers
        slower = max(VERL, key=lambda p: before[p].s)
        self.left_out.append(f"{slower} on {n} hosts: the slower serialisation, and a step takes minutes")
        return [p for p in self.with_peers if p != slower]

    def _print(self, n: int, *systems: str) -> None:
        for name in systems:
            if name not in self.rows[n]:
                continue
            m, compute_s = self.rows[n][name], self.with_compute_s(n, name)
            link = f"{m.busiest / 2**20:7.1f} MiB on the busiest link, {m.busiest_ratio:.2f} × the mean"
            minutes = (time.monotonic() - self.began) / 60
            print(
                f"{n:3d} hosts  {name:18} {m.s:8.3f} s  with compute {compute_s:8.3f} s  {link}  ({minutes:.1f} min)",
                flush=True,
            )

    def with_compute_s(self, n: int, name: str) -> float:
        row = self.rows[n]
        return row[f"{name}, compute"].s if name in OURS else row[name].s + self.compute_s

    def predicted(self) -> dict[str, Any]:
        """Returns the simulator's seconds of a step, beside ours; CPU costs and links are scaled on 2 and 4 hosts."""
        nominal, measured_rows = bytes_per_s(self.args.rate), self.measured()
        base = max((h for h in self.bare_s if h <= FITTED_HOSTS), default=None)
        if base is None:
            return {}
        reached = self.rows[base][OURS[0]].busiest / self.bare_s[base] / nominal

        def simulated(hosts: int, name: str, compute_s: float, cpu: float, network: float) -> list[SimulatedStep]:
            costs = load_hardware("namespaces").cpu
            scaled = {k: cpu * getattr(costs, k) for k in ("message_s", "byte_s", "sample_s")}
            scaled["pack_rate"] = costs.pack_rate / cpu
            hardware = load_hardware(
                "namespaces", network={"rate": nominal}, cpu=scaled, efficiency={"network": min(1.0, network)}
            )
            work = replace(self.work, split=name == OURS[0], compute_s=compute_s)
            # The same samples as in the steps that were measured: lengths, and so the busiest link, differ by step.
            steps = range(1, 1 + (self._few_with_compute() if compute_s else self.args.steps))
            return [predict(work, hosts, PER_HOST, nominal, k, hardware) for k in steps]

        # CPU costs by CPU seconds, not by those of a step, of which the CPU's are few on so few hosts.
        fitted = [(h, name) for h in measured_rows for name in OURS if 1 < h <= FITTED_HOSTS]
        cpu = statistics.geometric_mean(
            self.rows[h][name].cpu_s / statistics.mean(r.all_cpu_s for r in simulated(h, name, 0.0, 1.0, reached))
            for h, name in fitted
        )
        network = reached / statistics.geometric_mean(
            self.rows[h][name].s / statistics.median(r.step_s for r in simulated(h, name, 0.0, cpu, reached))
            for h, name in fitted
        )
        rows = []
        for h in measured_rows:
            for name in OURS:
                for compute_s, label in ((0.0, name), (self.compute_s, f"{name}, compute")):
                    guess = statistics.median(r.step_s for r in simulated(h, name, compute_s, cpu, network))
                    measured = self.rows[h][label].s
                    row = {"hosts": h, "name": label, "measured_s": round(measured, 3), "predicted_s": round(guess, 3)}
                    rows.append(row | {"error": round(guess / measured - 1, 4), "fitted": 1 < h <= FITTED_HOSTS})
        efficiency = {"link_efficiency": round(reached, 4), "of_steps": round(network, 4)}
        return {"cpu_factor": round(cpu, 3), **efficiency, "rows": rows}

    def measured(self) -> dict[int, dict[str, Measured]]:
        """Returns the rows that have our own steps."""
        return {h: row for h, row in self.rows.items() if f"{OURS[-1]}, compute" in row}

    def write(self) -> None:
        """Writes the result so far, if it is wanted: a run that is interrupted is not lost."""
        if self.args.json:
            self.args.json.write_text(json.dumps(self.result()) + "\n")

    def result(self) -> dict[str, Any]:
        ours, rows = "every byte moves", self.measured()

        def efficiency(name: str, base: int) -> dict[int, float]:
            if base not in rows:
                return {}
            first = self.with_compute_s(base, name)
            return {h: round(first / self.with_compute_s(h, name), 4) for h in rows if h >= base}

        def speedup(name: str, compute: bool) -> dict[int, float]:
            of = self.with_compute_s if compute else lambda h, n: self.rows[h][n].s
            return {h: round(of(h, name) / of(h, ours), 2) for h, row in rows.items() if name in row and h > 1}

        several = [h for h in rows if h > 1]
        verl = {h: [p for p in VERL if p in rows[h]] for h in several}
        fastest = {h: min(names, key=lambda p: self.rows[h][p].s) for h, names in verl.items() if names}
        return {
            "rate": self.args.rate,
            "bytes_per_host": {"samples": PER_HOST * WORK.rows * self.work.tokens * 24, "weights": weight_bytes(WORK)},
            "compute_s": round(self.compute_s, 3),
            "efficiency": efficiency(ours, PUBLISHED_HOSTS),
            "efficiency_vs_1": efficiency(ours, 1),
            "efficiency_colocated": efficiency("colocated", PUBLISHED_HOSTS),
            "efficiency_colocated_vs_1": efficiency("colocated", 1),
            "speedup_vs_controller": speedup("controller", compute=True),
            "speedup_vs_controller_no_compute": speedup("controller", compute=False),
            "speedup_vs_verl": {h: speedup(p, compute=True)[h] for h, p in fastest.items()},
            "speedup_vs_verl_no_compute": {h: speedup(p, compute=False)[h] for h, p in fastest.items()},
            "speedup_vs_transferqueue_no_compute": speedup("transferqueue", compute=False),
            "busiest_link_ratio": {h: round(self.rows[h][ours].busiest_ratio, 3) for h in several},
            "of_bare_link": {h: round(self.bare_s[h] / self.rows[h][ours].s, 3) for h in self.bare_s if h in rows},
            "largest_batch": self.survived,
            "peers": self.version,
            "left_out": self.left_out,
            "minutes": round((time.monotonic() - self.began) / 60, 1),
            "predicted": self.predicted(),
            "rows": {h: {name: m.as_dict() for name, m in row.items()} for h, row in self.rows.items()},
        }

    def table(self) -> str:
        """Returns Markdown: seconds of a step without compute, and with it after a slash."""
        systems = (*OURS, "controller", *PEERS)
        lines = ["| hosts | " + " | ".join((*systems, "bare link")) + " |", "| --- " * (len(systems) + 2) + "|"]
        for h, row in self.rows.items():
            replicas = [f"{row[n].s:.2f} / {self.with_compute_s(h, n):.2f}" if n in row else "" for n in systems]
            replicas.append(f"{self.bare_s[h]:.2f}" if h in self.bare_s else "")
            lines.append(f"| {h} | " + " | ".join(replicas) + " |")
        return "\n".join(lines)

    def draw(self) -> str:
        """Draws seconds without compute, and throughput with it."""
        names = {"every byte moves": "DistFlow", "colocated": "DistFlow, colocated", "controller": "single controller"}
        names |= {"verl": "verl (DataProto)", "transferqueue": "TransferQueue"}

        def fastest(name: str, row: dict[str, Measured]) -> str | None:
            return min(
                (n for n in (VERL if name == "verl" else [name]) if n in row), key=lambda n: row[n].s, default=None
            )

        systems = {
            label: [(h, n) for h, row in self.rows.items() if (n := fastest(name, row))]
            for name, label in names.items()
        }
        data = {label: [(h, self.rows[h][n].s) for h, n in found if h > 1] for label, found in systems.items()}
        data["bare link"] = [(h, s) for h, s in self.bare_s.items()]
        tokens = PER_HOST * WORK.rows * self.work.tokens
        rate = {
            label: [(h, h * tokens / self.with_compute_s(h, n)) for h, n in found] for label, found in systems.items()
        }
        first = rate["DistFlow"][0]
        rate["linear"] = [(h, h / first[0] * first[1]) for h, _ in rate["DistFlow"]]
        charts = [
            Chart("The data plane of a step", "hosts", f"seconds, links of {self.args.rate}, no compute", data),
            Chart("Weak scaling of whole steps", "hosts", "tokens per second, compute in the published ratio", rate),
        ]
        shown = [
            replace(c, lines={k: v for k, v in c.lines.items() if v}, dashed=("bare link", "linear")) for c in charts
        ]
        return svg(shown)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--steps", type=int, default=5, help="that are measured without compute; with it, half of them")
    parser.add_argument("--tokens", type=int, default=WORK.tokens, help="of a sample, on average")
    parser.add_argument("--rate", default="20mbit", help="of every link, each way")
    parser.add_argument("--peers", type=Path, default=Path(__file__).resolve().parent.parent / ".peers")
    parser.add_argument("--peer-timeout", type=float, default=400, help="seconds for one request to the peers")
    parser.add_argument("--json", type=Path, help="the result so far, written after each number of hosts and each peer")
    parser.add_argument("--svg", type=Path)
    parser.add_argument("--quick", action="store_true", help="1 to 4 hosts, two steps, short samples")
    args = parser.parse_args()
    if reason := why_not():
        sys.exit(f"no hosts on this machine: {reason}")
    if args.quick:
        args.hosts, args.steps, args.tokens = [1, 2, 4], 2, 512
    python = args.peers / "verl" / "bin" / "python"
    with tempfile.TemporaryDirectory(prefix="scaling-") as name:
        scaling = Scaling(args, Path(name))
        if python.exists():
            scaling.try_peers(python)
        else:
            scaling.left_out.append(f"peers: there is no {python}; see bench/peers/README.md")
        scaling.calibrate()
        for n in args.hosts:
            scaling.on_hosts(n)
        if scaling.with_peers:
            try:
                scaling.peers(python)
            except (RuntimeError, AssertionError, OSError) as e:  # as far as it goes
                scaling.left_out.append(f"peers: {e}")
                print(f"the peers went no further: {e}", file=sys.stderr)
    scaling.write()
    if args.svg:
        args.svg.write_text(scaling.draw())
    print(scaling.table())
    print(json.dumps(scaling.result()))


if __name__ == "__main__":
    main()
