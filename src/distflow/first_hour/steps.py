"""The steps of the first hour. Each runs programs and returns numbers, or raises what it has found. No torch."""

import json
import math
import os
import signal
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from distflow.first_hour.processes import HIDDEN, Clock, StepError, ask, run_program
from distflow.first_hour.setting import FULL, SMALL, base_config, write_inputs
from distflow.liveness.heartbeat import pids
from distflow.run_folder import METRICS, WORKERS

Numbers = dict[str, Any]
SHORT_S, LONG_S = 600.0, 2400.0
_SAME = ("reward/mean", "response_length/mean", "actor/loss", "actor/grad_norm")  # of two runs that should agree
_RELATIVE, _ABSOLUTE = 1e-3, 1e-4
_MISMATCH = {"float32": 1e-3, "bfloat16": 0.5}  # of a log-prob of the engine and the trainer's, at most
_KILLED_STEPS = 4


def file_name(step: str) -> str:
    return step.replace(", ", "-").replace(" ", "-")


@dataclass
class Setting:
    """The values that all steps share."""

    folder: Path
    facts: dict[str, Any]  # of the device
    quick: bool
    clock: Clock
    name: str = ""  # of the step

    @property
    def log(self) -> Path:
        return self.folder / "logs" / f"{file_name(self.name)}.log"

    @property
    def on_cpu(self) -> bool:
        return bool(self.facts["kind"] == "cpu")

    @property
    def workers(self) -> int:
        return int(self.facts["workers"])

    def ask(self, part: str, hidden: bool = False, **given: Any) -> dict[str, Any]:
        return ask(part, given, self.log, self.clock, hidden)


@dataclass(frozen=True)
class Step:
    name: str
    what: str  # it shows
    do: Callable[[Setting], Numbers]
    limit_s: float = SHORT_S
    needs: tuple[str, ...] = field(default=())  # what is not here skips the step: "accelerator", "several", "vllm"

    def why_not(self, facts: dict[str, Any]) -> str:
        """Returns why it cannot be done here; "": it can."""
        if "accelerator" in self.needs and facts["kind"] == "cpu":
            return "there is no accelerator here"
        if "several" in self.needs and facts["workers"] < 2:
            return "there is one device here"
        return str(facts["vllm"]) if "vllm" in self.needs else ""


def operations(setting: Setting) -> Numbers:
    found = setting.ask("operations")["operations"]
    done = {name: result for name, result in found.items() if "error" in result}
    wrong = [f"{n}: {r['error']:.3g}, allowed {r['limit']:g}" for n, r in done.items() if not r["error"] <= r["limit"]]
    if wrong:
        raise StepError("operations differ from those of the CPU: " + "; ".join(wrong))
    return {"operations": found}


def launches(setting: Setting) -> Numbers:
    sequences, longest = (4, 300) if setting.quick else (256, 1024)
    shape = setting.facts["shapes"]["large"]
    return setting.ask("launches", shape=shape, sequences=sequences, longest=longest)


def own_tests(setting: Setting) -> Numbers:
    """Runs the tests of the repository with the device instead of the rehearsal device."""
    root = Path(__file__).parents[3]
    if not (root / "tests" / "accelerator").is_dir():
        return {"left out": "the tests are not here: this is no clone of the repository"}
    where = [str(root / "tests" / "accelerator"), f"--rootdir={root}", "-c", str(root / "pyproject.toml")]
    words = [sys.executable, "-m", "pytest", *where, "-n", "0", "-m", "", "-p", "no:cacheprovider"]
    environment = {"DISTFLOW_TEST_DEVICE": setting.facts["kind"]}
    return {"tests": run_program(words, setting.log, setting.clock, environment).strip().splitlines()[-1]}


def distflow_run(setting: Setting, config: dict[str, Any], run: str, *words: str, **options: Any) -> list[Numbers]:
    """Trains as `distflow run` does, in a folder of its own; returns the metrics of each step."""
    folder = setting.folder / "runs" / run
    write_inputs(folder, config["data"]["batch"])
    (folder / "config.yaml").write_text(yaml.safe_dump({**config, "run_dir": str(folder / "run")}))
    command = [sys.executable, "-m", "distflow", "run", str(folder / "config.yaml"), *words]
    run_program(command, setting.log, setting.clock, **options)
    lines = (folder / "run" / METRICS).read_text().splitlines()
    return [m for m in map(json.loads, lines) if "actor/loss" in m]


def tiny(setting: Setting, dtype: str, steps: int = _KILLED_STEPS) -> dict[str, Any]:
    config = base_config(SMALL, "qwen2", setting.workers) | {"steps": steps, "train": {"lr": 1e-3, "dtype": dtype}}
    return config | {"checkpoint": {"every": 1}, "rollout": {"n": 4, "max_tokens": 8, "engine": "builtin"}}


def on_cpu(setting: Setting) -> Numbers:
    metrics = distflow_run(setting, tiny(setting, "float32"), "on-cpu", environment=HIDDEN)
    return {"steps": len(metrics)}


def in_float32(setting: Setting) -> Numbers:
    metrics = distflow_run(setting, tiny(setting, "float32"), "float32")
    if not setting.on_cpu:
        _compare(metrics, _metrics_of(setting, "on-cpu"), "the same on the CPU")
    return _measured(metrics, "float32")


def in_bfloat16(setting: Setting) -> Numbers:
    return _measured(distflow_run(setting, tiny(setting, "bfloat16"), "bfloat16"), "bfloat16")


def killed(setting: Setting) -> Numbers:
    """Kills a worker after the first step; the run has to restart by itself, and go on as if nothing had been."""
    run, gone = setting.folder / "runs" / "killed" / "run", list[int]()

    def kill(launcher: int) -> None:
        if not gone and (run / METRICS).exists() and '"step"' in (run / METRICS).read_text():
            gone.extend(pids(run / WORKERS)[-1:])
            for pid in gone:
                os.kill(pid, signal.SIGKILL)

    metrics = distflow_run(setting, tiny(setting, "float32") | {"restarts": 1}, "killed", watch=kill)
    if not gone:
        raise StepError("no worker could be killed: the run was over")
    _compare(metrics, _metrics_of(setting, "float32"), "the run that nobody disturbed")
    return {"killed": len(gone)}


def resumed(setting: Setting) -> Numbers:
    distflow_run(setting, tiny(setting, "float32", steps=2), "resumed")
    metrics = distflow_run(setting, tiny(setting, "float32"), "resumed", "--resume")
    _compare(metrics, _metrics_of(setting, "float32"), "the run that was never stopped")
    return {"steps": len(metrics)}


@dataclass(frozen=True)
class Run:
    """A run of a model of real size, as far as the device has room for it."""

    model: str  # small or large
    engine: str
    workers: str = "all"  # or one
    tp: bool = False  # generates with as many ranks of a replica as the model has heads for
    place: str = "together"  # split: generation and training on different ranks; overlapped: and at the same time

    @property
    def name(self) -> str:
        parts = [f"{self.model} on {self.workers}", self.engine, "tp" if self.tp else "", self.place]
        return ", ".join(p for p in parts if p not in ("", "together"))

    @property
    def step(self) -> Step:
        engine = ("vllm",) if self.engine == "vllm" else ()
        several = ("several",) if self.tp or self.place != "together" else ()
        what = f"a {self.model} model trains with the engine {self.engine}"
        return Step(self.name, what, self, LONG_S, engine + several)

    def __call__(self, setting: Setting) -> Numbers:
        facts, workers = setting.facts, 1 if self.workers == "one" else setting.workers
        shape, model = facts["shapes"][self.model], setting.folder / "models" / self.model
        if not (model / "config.json").exists():
            setting.ask("models", folder=str(model), shape=shape)
        config = base_config(SMALL if setting.quick or setting.on_cpu else FULL, str(model), workers)
        config["rollout"] |= {"engine": self.engine, **({"staleness": 1} if self.place == "overlapped" else {})}
        if setting.on_cpu and self.engine == "vllm":
            config["rollout"]["kv_cache_gb"] = 0.1
        config["placement"] = self._placement(shape, workers)
        run = file_name(self.name)
        metrics = distflow_run(setting, config, run)
        file = setting.folder / "runs" / run / "config.yaml"
        keys = ("kind", "name", "memory", "bfloat16")
        predicted = setting.ask("prediction", True, config=str(file), **{key: facts[key] for key in keys})
        dtype = predicted["chosen"].get("train.dtype", "float32")
        numbers = _measured(metrics, dtype, predicted)
        return numbers | {"chosen": predicted["chosen"], "layers": shape["layers"]}

    def _placement(self, shape: dict[str, Any], workers: int) -> dict[str, Any]:
        if self.place != "together":
            half = workers // 2
            return {
                "ranks": {"rollout": f"0-{half - 1}", "train": f"{half}-{workers - 1}"},
                "default": {"ranks": "train"},
                "nodes": {"actor.generate": {"ranks": "rollout"}},
            }
        return {"nodes": {"actor.generate": {"tp": math.gcd(workers, shape["kv_heads"])}}} if self.tp else {}


def _runs() -> Iterator[Run]:
    for engine in ("builtin", "vllm"):
        yield Run("small", engine, "one")
    for engine in ("builtin", "vllm"):
        for tp in (False, True):
            yield Run("large", engine, tp=tp)
    for place in ("split", "overlapped"):
        yield replace(Run("large", "builtin"), place=place)


STEPS: Sequence[Step] = (
    Step("operations", "kernels that only the device has compute what the CPU does", operations),
    Step("on the CPU", "a run without the accelerator, for comparison", on_cpu, needs=("accelerator",)),
    Step("float32", "a small run has the metrics of the CPU", in_float32),
    Step("bfloat16", "the engine's log-probs are near the trainer's", in_bfloat16),
    Step("a killed worker", "the run restarts and its curve is the same", killed),
    Step("resume", "a run that was stopped goes on and its curve is the same", resumed),
    Step("launches", "a decoding step asks for as many kernels as predicted", launches, needs=("accelerator",)),
    *(run.step for run in _runs()),
    Step("own tests", "the tests of the repository pass on the device", own_tests, LONG_S, ("accelerator",)),
)


def _metrics_of(setting: Setting, run: str) -> list[Numbers]:
    file = setting.folder / "runs" / run / "run" / METRICS
    if not file.exists():
        raise StepError(f"the run '{run}' is not there to be compared with")
    return [m for m in map(json.loads, file.read_text().splitlines()) if "actor/loss" in m]


def _compare(ours: list[Numbers], theirs: list[Numbers], what: str) -> None:
    """Raises unless two runs have the same steps and metrics."""
    if [m["step"] for m in ours] != [m["step"] for m in theirs]:
        raise StepError(f"steps {[m['step'] for m in ours]}, and {[m['step'] for m in theirs]} in {what}")
    for mine, other in zip(ours, theirs, strict=True):
        for key in _SAME:
            if not math.isclose(mine[key], other[key], rel_tol=_RELATIVE, abs_tol=_ABSOLUTE):
                raise StepError(f"step {mine['step']}: {key} is {mine[key]:.6g}, and {other[key]:.6g} in {what}")


def _measured(metrics: list[Numbers], dtype: str, predicted: Numbers | None = None) -> Numbers:
    """Returns what a run has shown beside what was predicted. Raises if the engine disagrees with the trainer."""
    mismatch, limit = max(m["rollout/mismatch_max"] for m in metrics), _MISMATCH[dtype]
    peaks = [m["perf/device_peak_mib"] / 1024 for m in metrics if "perf/device_peak_mib" in m]
    speed = statistics.median(m["perf/tokens_per_s"] for m in metrics[-max(1, len(metrics) - 1) :])
    numbers: Numbers = {"mismatch": {"limit": limit, "measured": mismatch}}
    numbers["tokens_per_s"] = {"measured": speed}
    if peaks:
        numbers["memory_gib"] = {"measured": max(peaks)}
    if predicted:
        numbers.setdefault("memory_gib", {})["predicted"] = max(predicted["memory"].values()) / (1 << 30)
        numbers["phases_gib"] = {name: size / (1 << 30) for name, size in predicted["memory"].items()}
        if predicted["tokens_per_s"]:
            numbers["tokens_per_s"]["predicted"] = predicted["tokens_per_s"]
    if not mismatch <= limit:
        raise StepError(f"rollout/mismatch_max is {mismatch:.3g}, and {limit:g} is allowed in {dtype}")
    return numbers
