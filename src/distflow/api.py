"""The commands as functions of a script or notebook: `distflow.run`, `plan`, `check`, `evaluate`, `export`,
`gpu_check`.

A config is the path of a file, or a dict with the same keys. Further keys are keyword arguments: sections are merged,
so `train={"lr": 1e-5}` changes one key of a section. Wherever a config names a function or class, `file.py:name`, an
object may be given instead, if workers can import it.
"""

import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import yaml

from distflow.cluster.launch_env import read_launch_env
from distflow.errors import ConfigError, StoppedError
from distflow.flow.importing import refuse_while_loading
from distflow.flow.object_reference import object_reference
from distflow.flow.trace import FlowFunction
from distflow.util.temporary import temporary_folder

if TYPE_CHECKING:
    from distflow.config import Config
    from distflow.first_hour.check import Report, Result
    from distflow.plan import Plan
    from distflow.run.program import Program
    from distflow.run.result import RunResult

Source = str | Path | Mapping[str, Any] | None
OnStep = Callable[[int, dict[str, float]], object]


def run(
    config: Source = None,
    overrides: Sequence[str] = (),
    *,
    resume: str | None = None,
    on_step: OnStep | None = None,
    **sections: Any,
) -> "RunResult":
    """Trains, with N worker processes on this machine; in a script that torchrun or srun starts, as one of the workers.

    `overrides` are as on the command line: `["train.lr=1e-5"]`. `resume` is what `--resume` takes, `"auto"` or a path.
    `on_step(step, metrics)` is called here after each step; if it raises, the run ends after the step, which is saved,
    and so does this call. A run that fails raises `RunError` with the cause.
    """
    refuse_while_loading("distflow.run()")
    return _run(load_program(config, overrides, sections), "run", resume, on_step)


def evaluate(
    config: Source = None, overrides: Sequence[str] = (), *, checkpoint: str | Path | None = None, **sections: Any
) -> dict[str, float]:
    """Evaluates the model, or a checkpoint or run, on the held-out set of `eval`; returns the metrics."""
    refuse_while_loading("distflow.evaluate()")
    own_folder = "run_dir" in sections or has_own_folder(overrides)
    return _run(evaluation(load_program(config, overrides, sections), checkpoint, own_folder), "eval").last


def plan(config: Source = None, overrides: Sequence[str] = (), **sections: Any) -> "Plan":
    """Returns the plan: which rank runs what, and what moves between ranks."""
    return load_program(config, overrides, sections).checked_plan()


def check(config: Source = None, overrides: Sequence[str] = (), **sections: Any) -> list[str]:
    """Checks everything short of training. Returns a line for each check; raises the first error."""
    from distflow.run.check import check

    refuse_while_loading("distflow.check()")
    return list(check(load_program(config, overrides, sections)))


def export(
    run: "str | Path | RunResult",
    out: str | Path,
    *,
    step: int | None = None,
    role: str | None = None,
    adapter: bool = False,
    base: str | None = None,
    dtype: Any = None,
    ema: bool = False,
    push_to_hub: str | None = None,
    private: bool = False,
) -> Path:
    """Writes the weights of a run, the newest or those of `step`, as a directory for `from_pretrained`.

    `push_to_hub`: the name, OWNER/NAME, under which they are uploaded then.
    """
    from distflow.checkpoint.export import export, export_adapter
    from distflow.checkpoint.model_card import check_hub_name, push

    folder = Path(run) if isinstance(run, str | Path) else run.folder
    if push_to_hub is not None:
        check_hub_name(push_to_hub)
    if adapter:
        path = export_adapter(folder, Path(out), step, role, ema)
    else:
        path = export(folder, Path(out), step, role, base, dtype, ema)
    if push_to_hub is not None:
        push(path, push_to_hub, private)
    return path


def gpu_check(
    out: str | Path = "gpu-check",
    quick: bool = False,
    only: Sequence[str] = (),
    workers: int | None = None,
    step_limit_s: float | None = None,
    on_result: "Callable[[Result], object] | None" = None,
) -> "Report":
    """Tries on this machine's accelerators what could not be tried without; writes a report into the folder `out`.

    `quick`: with tiny models only; `only`: the names of some steps; `workers`: devices to use, instead of all. A step
    that fails, or takes longer than its limit, stops no other one.
    """
    from distflow.first_hour.check import check
    from distflow.first_hour.table import write_text

    refuse_while_loading("distflow.gpu_check()")
    report = check(Path(out), quick, only, workers, step_limit_s, on_result or (lambda result: None))
    write_text(report, Path(out))
    return report


def load_program(
    config: Source,
    overrides: Sequence[str] = (),
    sections: Mapping[str, Any] = MappingProxyType({}),
    base: Path | None = None,
) -> "Program":
    """Binds a config to code. Objects in it are replaced by their references; its paths start at `base`."""
    from distflow.config.loading import make_config, read_config
    from distflow.run.program import Program

    file = Path(config) if isinstance(config, str | Path) else None
    raw = read_config(file) if file else _plain(config or {}, "")
    where, name = (str(file), file.stem) if file else ("the config", "run")
    base = base or (file.parent if file else Path.cwd())
    return Program(make_config(_merge(raw, _plain(sections, "")), overrides, base, where, name))


def has_own_folder(overrides: Sequence[str]) -> bool:
    return any(o.startswith("run_dir=") for o in overrides)


def evaluation(program: "Program", checkpoint: str | Path | None, own_folder: bool) -> "Program":
    """Returns a program that only evaluates, in a folder beside that of the run unless it has one of its own."""
    from distflow.run.program import Program

    config = program.config
    if config.eval is None:
        raise ConfigError("the config has no `eval` section; add one: `eval: held-out.jsonl`")
    folder = str(config.run_folder) if own_folder else f"{config.run_folder}-eval"
    path = None
    if checkpoint is not None:
        from distflow.checkpoint.model import find_checkpoint

        path = find_checkpoint(config.run_folder, str(checkpoint))
    return Program(config.model_copy(update={"steps": 0, "epochs": None, "run_dir": folder}), path)


def start(
    program: "Program",
    command: Sequence[str],
    resume: str | None = None,
    again: Sequence[str] = (),
    ray: str | None = None,
) -> int:
    """Becomes a worker if the environment says so, else launches all workers; returns the exit code.

    `command`: the words after `distflow` with which each worker is started; `again`: those with which a user starts the
    run again, none for the Python API; `ray`: the address of the Ray cluster to run on, "" for the one that is found.
    """
    # Before torch is imported: it logs every connection that fails, with frames of C++; we log what it means.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if resume and program.config.steps == 0:
        raise ConfigError(
            "--resume: steps is 0, so there is nothing to continue; to evaluate a checkpoint, use"
            " `distflow eval CONFIG --checkpoint`"
        )
    if env := read_launch_env():
        from distflow.run.process import run_worker

        return run_worker(program, env, resume)
    program.checked_plan()  # reports a mistake once, before any worker starts
    if program.checkpoint:
        command = [*command, f"--checkpoint={program.checkpoint}"]
    if ray is not None:
        from distflow.cluster.ray import launch as launch_on_ray

        return launch_on_ray(program.config, command, resume, again, ray)
    from distflow.cluster.local import launch

    return launch(program.config, command, resume, again)


def _plain(value: Any, where: str) -> Any:
    """Returns plain YAML values: functions, classes and flows as references, paths as text."""
    if isinstance(value, Mapping):
        return {k: _plain(v, f"{where}.{k}" if where else str(k)) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v, where) for v in value]
    if isinstance(value, Path):
        return str(value)
    return object_reference(value, where) if callable(value) or isinstance(value, FlowFunction) else value


def _merge(old: Any, new: Any) -> Any:
    from distflow.config.loading import long_form

    if not isinstance(old, dict) or not isinstance(new, dict):
        return new
    return old | {k: _merge(long_form(k, old.get(k)), v) for k, v in new.items()}


def _run(program: "Program", command: str, resume: str | None = None, on_step: OnStep | None = None) -> "RunResult":
    from distflow.observe.logs import logged_errors, set_up_logging
    from distflow.run.result import RunError, RunResult, StepCalls

    set_up_logging(keep=True)
    config = program.config
    calls = StepCalls(config.run_folder, on_step) if on_step else None
    with logged_errors() as errors, calls or nullcontext():
        if read_launch_env():
            code = start(program, (), resume)
        else:
            with _workers_can_import(), _config_file(config) as file:
                folder = [f"run_dir={config.run_folder}"] if command == "eval" else []
                words = [command, file, *folder, "--relative-to", str(config.base.absolute())]
                code = start(program, words, resume)
    if calls:
        calls.raise_error()
    if code > 128:
        raise StoppedError(f"the run was stopped by signal {code - 128}; continue it with resume='auto'")
    if code:
        raise RunError("\n".join(errors) or f"the run failed with exit code {code}")
    return RunResult.read(config.run_folder)


@contextmanager
def _config_file(config: "Config") -> Iterator[str]:
    """Writes the config for the workers: it may have been a dict."""
    with temporary_folder(Path(tempfile.gettempdir())) as folder:
        path = folder / "config.yaml"
        given = config.model_dump(mode="json", exclude_unset=True)  # the rest is chosen for the workers' device
        path.write_text(yaml.safe_dump(given, sort_keys=False), encoding="utf-8")
        yield str(path)


@contextmanager
def _workers_can_import() -> Iterator[None]:
    """Passes this process's import path to the workers, and restores the environment afterwards."""
    before = dict(os.environ)
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
