"""Steps of GRPO, PPO and long responses over hosts with shaped links, beside a single controller and verl's data plane.

    python bench/in_small.py [--only GRPO PPO long parts] [--rate 20mbit] [--peers DIR] [--json FILE]

The settings of bench/scaling.py with samples of 512 tokens: hosts are network namespaces (this needs root) of two
workers and 64 samples, every byte changes its owner, compute is a sleep, 81 : 10 to our own data plane of GRPO on four
hosts as published. PPO has a critic of the actor's size: a call and an update more, and 1.4 times the compute. Long
responses are four times as long, with four times the compute. `parts` are steps of GRPO on four hosts without balance,
with compute in proportion to a worker's tokens, and without the local path, with none. Controllers are given the
seconds of the compute, as a driver waits for every call. The last line is one JSON object.
"""

import os

os.environ |= {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}  # a fork of a process with threads may hang

import argparse
import json
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from links import controlled, decentralised
from ray_cluster import RayCluster
from scaling import COMPUTE_RATIO, PER_HOST, PUBLISHED_HOSTS, RAY_FOLDER, WORK
from steps import COMPUTE, Work
from workers import Hosts, why_not

SAMPLE = replace(WORK, tokens=512, split=True)
PARTS = "parts"
STEPS, FEW = 2, 8  # steps that are measured, on so many hosts; one on more
Seconds = dict[int, dict[str, float]]  # hosts → system → seconds of a step


@dataclass(frozen=True)
class Scenario:
    """Steps to measure on these hosts; with a controller on those that do not take minutes."""

    work: Work
    compute: float  # in that of a step of GRPO
    hosts: tuple[int, ...]
    controlled: int  # on most hosts
    verl: int = 0


SCENARIOS = {
    "GRPO": Scenario(SAMPLE, 1.0, (2, 4, 8, 16, 32), 16, 8),
    "PPO": Scenario(replace(SAMPLE, ppo=True), sum(COMPUTE.values()), (2, 4, 8, 16), 8),
    "long": Scenario(replace(SAMPLE, tokens=4 * SAMPLE.tokens), 4.0, (2, 4, 8), 4),
}


class Run:
    """What was measured so far: by scenario, number of hosts and system."""

    def __init__(self, rate: str, folder: Path, json_file: Path | None) -> None:
        self.rate, self.folder, self.json_file = rate, folder, json_file
        self.rows: dict[str, Seconds] = {}
        self.parts: dict[str, float] = {}
        self.compute_s = 0.0
        with Hosts(PUBLISHED_HOSTS, rate) as hosts:
            self.compute_s = COMPUTE_RATIO * self.ours(hosts, SAMPLE, 5)

    def ours(self, hosts: Hosts, work: Work, steps: int = STEPS) -> float:
        with tempfile.TemporaryDirectory(dir=self.folder) as run:
            return decentralised(hosts, PER_HOST, work, steps, run).s

    def measure(self, name: str, scenario: Scenario) -> None:
        seconds = self.rows.setdefault(name, {})
        compute_s = self.compute_s * scenario.compute
        of_grpo = sum(COMPUTE.values()) if scenario.work.ppo else 1.0  # `compute_s` is without what PPO has besides
        whole = replace(scenario.work, compute_s=compute_s / of_grpo)
        for n in scenario.hosts:
            with Hosts(n, self.rate) as hosts:
                steps = STEPS if n <= FEW else 1
                row = seconds[n] = {"ours": self.ours(hosts, whole, steps)}
                row["data plane"] = self.ours(hosts, scenario.work, steps)
                if n <= scenario.controlled:
                    row["controller"] = controlled(hosts, PER_HOST, scenario.work, 1).s + compute_s
            print(f"{name}, {n} hosts: " + ", ".join(f"{k} {v:.2f} s" for k, v in row.items()), flush=True)
            self.write()

    def verl(self, name: str, scenario: Scenario, python: Path) -> str:
        """Measures verl's data plane with its faster serialisation; returns its version."""
        sizes = [n for n in scenario.hosts if n <= scenario.verl]
        with Hosts(max(sizes), self.rate, private=[RAY_FOLDER]) as hosts:
            cluster = RayCluster(hosts, python, self.folder / "peers.log", 200)
            size = {"rows": PER_HOST * scenario.work.rows, "tokens": scenario.work.tokens, "steps": 1}
            for n in sizes:
                cluster.grow(n)
                s = min(cluster.ask(system="verl, numpy", hosts=n, **size)) + self.compute_s * scenario.compute
                self.rows[name][n]["verl"] = s
                print(f"{name}, {n} hosts: verl {s:.2f} s", flush=True)
                self.write()
            return cluster.version

    def measure_parts(self) -> None:
        """Takes the local path and balance away from a step in which all workers generate and train."""
        work = replace(SAMPLE, split=False, compute_s=self.compute_s, by_tokens=True)
        variants = {"whole": work, "without balance": replace(work, balance=False)}
        with Hosts(PUBLISHED_HOSTS, self.rate) as hosts:
            for name, variant in variants.items():
                self.parts[name] = self.ours(hosts, variant, 2)
            variants["without the local path"] = replace(
                work, split=True
            )  # ranks that only train have twice the samples
            for name, variant in variants.items():
                self.parts[f"{name}, no compute"] = self.ours(hosts, replace(variant, compute_s=0.0), 4)
        print(", ".join(f"{name}: {s:.2f} s" for name, s in self.parts.items()), flush=True)

    def write(self) -> None:
        """Writes the result so far, if it is wanted: a run that is interrupted is not lost."""
        if self.json_file:
            self.json_file.write_text(json.dumps(self.result()) + "\n")

    def result(self) -> dict[str, Any]:
        def ahead(of: str) -> dict[str, dict[int, float]]:
            found = {
                name: {n: round(row[of] / row["ours"], 2) for n, row in seconds.items() if of in row}
                for name, seconds in self.rows.items()
            }
            return {name: ratios for name, ratios in found.items() if ratios}

        def efficiency(seconds: Seconds) -> dict[int, float]:
            first = seconds[min(seconds)]["ours"]
            return {n: round(first / row["ours"], 4) for n, row in seconds.items()}

        return {
            "rate": self.rate,
            "compute_s": round(self.compute_s, 3),
            "speedup_vs_controller": ahead("controller"),
            "speedup_vs_verl": ahead("verl"),
            "weak_scaling": {name: efficiency(seconds) for name, seconds in self.rows.items()},
            "parts": {name: round(s, 3) for name, s in self.parts.items()},
            "rows": {
                name: {n: {k: round(v, 3) for k, v in r.items()} for n, r in s.items()} for name, s in self.rows.items()
            },
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[*SCENARIOS, PARTS], default=[*SCENARIOS, PARTS])
    parser.add_argument("--rate", default="20mbit", help="of every link, each way")
    parser.add_argument("--peers", type=Path, default=Path(__file__).resolve().parent.parent / ".peers")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if reason := why_not():
        sys.exit(f"no hosts on this machine: {reason}")
    python, began, version = args.peers / "verl" / "bin" / "python", time.monotonic(), None
    with tempfile.TemporaryDirectory(prefix="in-small-") as name:
        run = Run(args.rate, Path(name), args.json)
        if PARTS in args.only:
            run.measure_parts()
        for scenario in (s for s in SCENARIOS if s in args.only):
            run.measure(scenario, SCENARIOS[scenario])
            if SCENARIOS[scenario].verl and python.exists():
                try:
                    version = run.verl(scenario, SCENARIOS[scenario], python)
                except (RuntimeError, AssertionError, OSError) as e:  # as far as it goes
                    print(f"verl went no further: {e}", file=sys.stderr)
    result = run.result() | {"verl": version, "minutes": round((time.monotonic() - began) / 60, 1)}
    if args.json:
        args.json.write_text(json.dumps(result) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
