"""The command line: `distflow run`, `plan`, `check`, `show` and others. Imports nothing heavy too early."""

import argparse
import json
import logging
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import distflow
from distflow import api
from distflow.errors import ConfigError, DistflowError, cut, printable
from distflow.observe.logs import set_up_logging
from distflow.page.commands import add_commands
from distflow.run_folder import AUTO, NEWEST
from distflow.util.extras import how_to_install

if TYPE_CHECKING:
    from rich.console import RenderableType

    from distflow.run.program import Program

logger = logging.getLogger(__name__)
DTYPES = ("float32", "bfloat16", "float16")  # of an export
_GPU_CHECK = "Try on this machine's accelerators what nobody could try without them, and write a report to send us."


def main(argv: Sequence[str] | None = None) -> None:
    parser = _parser()
    if not (sys.argv[1:] if argv is None else argv):
        parser.print_help()
        sys.exit(0)
    args, rest = parser.parse_known_args(argv)
    for word in rest:  # overrides may also follow an option
        if word.startswith("-") or not hasattr(args, "config"):
            parser.error(f"unknown {'option' if word.startswith('-') else 'argument'} {cut(word)}")
        args.overrides.append(word)
    try:
        set_up_logging()
        sys.exit(args.command(args))
    except DistflowError as e:
        logger.error(e)
        sys.exit(2)
    except KeyboardInterrupt:  # before or after the run, which has handlers of its own
        logger.warning("stopped by SIGINT")
        sys.exit(128 + signal.SIGINT)


class _PrintCompletion(argparse.Action):
    """Prints the script that completes commands, options and files in a shell."""

    def __call__(self, parser: argparse.ArgumentParser, *args: Any) -> None:
        try:
            import shtab
        except ImportError as e:
            parser.exit(2, f"distflow: shtab is not installed ({e}); {how_to_install('completion')}\n")
        (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
        for action in (a for command in commands.choices.values() for a in command._actions):
            if action.metavar in ("CONFIG", "RUN", "OUT", "FILE", "DIR", "PATH"):
                action.complete = shtab.FILE
        print(shtab.complete(parser, args[1]))
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "distflow", description="RL post-training of language models: a graph, run by N workers without a driver."
    )
    parser.add_argument(
        "--print-completion", choices=["bash", "zsh", "tcsh"], action=_PrintCompletion, help="for `eval` in a shell"
    )
    parser.add_argument("--version", action="version", version=f"distflow {distflow.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, function: Callable[[argparse.Namespace], int], help: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=help, description=help)
        command.set_defaults(command=function, name=name)
        command.add_argument("config", metavar="CONFIG", help="YAML file")
        command.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="dotted overrides, e.g. data.batch=64")
        command.add_argument("--workers", type=int, metavar="N", help="number of workers, instead of the config's")
        return command

    plan = add("plan", _plan, "Show the plan: which rank runs what, and what moves between ranks.")
    form = plan.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print it as JSON")
    form.add_argument("--svg", metavar="FILE", type=Path, help="draw it")
    _add_simulate(add("simulate", _simulate, "Predict a step on hardware that is not here, from the same plan."))
    run = add("run", _run, "Train: on this machine, or as one worker of torchrun, Slurm or Kubernetes.")
    run.add_argument(
        "--resume",
        nargs="?",
        const=NEWEST,
        metavar="PATH",
        help="continue from the newest complete checkpoint of the run, or from this checkpoint or run;"
        f" '{AUTO}': from the newest if there is one, else from the beginning",
    )
    run.add_argument("--launcher", choices=["local", "ray"], default="local", help="who starts the workers")
    run.add_argument("--address", metavar="HOST:PORT", help="of the Ray cluster; default: the one that is found")
    check = add("check", _check, "Check everything short of training: data, model, one reward, memory.")
    check.add_argument(
        "--memory",
        nargs="?",
        const="",
        metavar="SIZE",
        help="only the memory of each phase of a step, with what makes it, on accelerators of this size (80GiB), which"
        " need not be here; default: that of this machine's",
    )
    evaluate = add("eval", _eval, "Evaluate the model, or a checkpoint, on the held-out set, without training.")
    evaluate.add_argument(
        "--checkpoint",
        nargs="?",
        const=NEWEST,
        metavar="PATH",
        help="the newest checkpoint of the run, or this checkpoint or run, instead of the model",
    )
    for command in (run, evaluate):
        command.add_argument(
            "--relative-to", type=Path, metavar="DIR", help="where paths start, instead of the config's folder"
        )
    export = commands.add_parser("export", help="Write a run's weights as a Hugging Face directory.")
    export.set_defaults(command=_export, overrides=[])
    export.add_argument("run", type=Path, metavar="RUN", help="the folder of a run")
    export.add_argument("out", type=Path, metavar="OUT", help="a directory that is new or empty")
    export.add_argument("--step", type=int, metavar="N", help="the checkpoint of this step instead of the newest")
    export.add_argument("--role", metavar="ROLE", help="another model of the run than the actor, such as critic")
    export.add_argument("--ema", action="store_true", help="the moving average of the weights (train.ema)")
    export.add_argument("--dtype", choices=DTYPES, help="instead of the dtype of the model that was trained")
    export.add_argument("--adapter", action="store_true", help="only the LoRA adapter, in PEFT's format")
    export.add_argument("--push-to-hub", metavar="OWNER/NAME", help="upload it to the hub, with its model card")
    export.add_argument("--private", action="store_true", help="the hub shows it to you alone")
    export.add_argument("--base", metavar="MODEL", help="where the base model of an adapter is now, if it was moved")
    _add_gpu_check(commands.add_parser("gpu-check", help=_GPU_CHECK, description=_GPU_CHECK))
    add_commands(commands)
    return parser


def _add_gpu_check(command: argparse.ArgumentParser) -> None:
    command.set_defaults(command=_gpu_check, overrides=[])
    command.add_argument("--out", type=Path, default=Path("gpu-check"), metavar="DIR", help="default: gpu-check")
    command.add_argument("--quick", action="store_true", help="tiny models only: minutes instead of an hour")
    command.add_argument("--only", action="append", default=[], metavar="STEP", help="only this step; may be repeated")
    command.add_argument("--workers", type=int, metavar="N", help="devices to use, instead of all that are here")
    command.add_argument("--step-limit-s", type=float, metavar="S", help="time limit of each step, instead of its own")


def _add_simulate(command: argparse.ArgumentParser) -> None:
    from distflow.simulate.failures import LOST_PER_DAY

    command.add_argument("--hardware", required=True, metavar="NAME", help="h100, h20, a100, namespaces, or a file")
    command.add_argument("--model", metavar="NAME", help="shapes of another model than the config's, e.g. qwen2.5-7b")
    command.add_argument("--prompt-tokens", type=float, metavar="N", help="of a prompt")
    command.add_argument("--response-tokens", type=float, metavar="N", help="of a response, on average")
    command.add_argument("--spread", type=float, metavar="SIGMA", help="of the logarithm of the response length")
    command.add_argument(
        "--node-seconds", action="append", default=[], metavar="NODE=S", help="what a node takes, instead of a roofline"
    )
    command.add_argument(
        "--overlap", type=float, metavar="D", help="forecast: rank sets D steps apart; default: rollout.staleness"
    )
    command.add_argument("--search", action="store_true", help="propose placements, the fastest first, with reasons")
    command.add_argument(
        "--draws", type=int, default=0, metavar="N", help="how steps differ: N with lengths and devices drawn anew"
    )
    command.add_argument(
        "--failures",
        nargs="?",
        type=float,
        const=LOST_PER_DAY,
        metavar="N",
        help=f"how much time is useful if N of 1,000 hosts fail a day, and when to save; default {LOST_PER_DAY:g}",
    )
    for name, default, what in (
        ("restart", 300, "a failure to the next step"),
        ("save", 1, "the beginning of a save until the workers go on"),
        ("write", 60, "then until the checkpoint is complete"),
    ):
        text = f"with --failures: seconds from {what}; default: {default}"
        command.add_argument(f"--{name}", type=float, default=default, metavar="S", help=text)
    command.add_argument("--record", type=Path, metavar="DIR", help="write the step for `distflow show DIR`")
    form = command.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print it as JSON")
    form.add_argument("--svg", metavar="FILE", type=Path, help="draw the timeline")


def _simulate(args: argparse.Namespace) -> int:
    from distflow.simulate.binding import SPREAD, Assumptions, parse_node_seconds
    from distflow.simulate.failures import Failures
    from distflow.simulate.hardware import load_hardware
    from distflow.simulate.report import make_report
    from distflow.simulate.table import render
    from distflow.simulate.timeline import svg

    program = _program(args)
    given = Assumptions(
        args.model,
        args.prompt_tokens,
        args.response_tokens,
        SPREAD if args.spread is None else args.spread,
        parse_node_seconds(args.node_seconds),
    )
    hardware = load_hardware(args.hardware)
    overlap = program.config.rollout.staleness if args.overlap is None else args.overlap
    failures = None if args.failures is None else Failures(args.failures, args.restart, args.save, args.write)
    workers = program.config.workers or 1
    report = make_report(program, workers, hardware, given, overlap, args.search, args.draws, failures)
    if args.record:
        from distflow.simulate.recording import record_step

        record_step(report, args.record)
    if args.json:
        print(json.dumps(report.to_json(), indent=2))
    elif args.svg:
        _write(args.svg, svg(report))
    else:
        _print(render(report))
    return 0


def _plan(args: argparse.Namespace) -> int:
    from distflow.plan.svg import svg
    from distflow.plan.table import render

    plan = api.plan(args.config, _overrides(args))
    if args.json:
        print(json.dumps(plan.to_json() | {"hash": plan.hash}, indent=2))
    elif args.svg:
        _write(args.svg, svg(plan))
    else:
        _print(render(plan))
    return 0


def _write(path: Path, drawing: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(drawing)
    except OSError as e:
        raise ConfigError(f"--svg {path}: cannot be written: {e.strerror}") from None
    print(printable(f"wrote {path}"))


def _print(tables: "RenderableType") -> None:
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else 120).print(tables)


def _run(args: argparse.Namespace) -> int:
    resume = _value(args, args.resume)
    if args.address and args.launcher != "ray":
        raise ConfigError("--address is for --launcher ray")
    ray = (args.address or "") if args.launcher == "ray" else None
    options = [] if ray is None else ["--launcher=ray", *([f"--address={ray}"] if ray else [])]
    return _start(args, _program(args), resume, options, ray)


def _eval(args: argparse.Namespace) -> int:
    checkpoint = _value(args, args.checkpoint)
    program = api.evaluation(_program(args), checkpoint, api.has_own_folder(args.overrides))
    args.overrides.append(f"run_dir={program.config.run_folder}")
    return _start(args, program)


def _start(
    args: argparse.Namespace,
    program: "Program",
    resume: str | None = None,
    options: Sequence[str] = (),
    ray: str | None = None,
) -> int:
    """Starts workers that run this command."""
    config, base = program.config, args.relative_to
    words = [args.name, args.config, *args.overrides, *(["--relative-to", str(base.absolute())] if base else [])]
    again = ["distflow", *words, *([] if config.workers is None else [f"--workers={config.workers}"]), *options]
    return api.start(program, words, resume, again, ray)


def _value(args: argparse.Namespace, value: str | None) -> str | None:
    """Returns the value of an option that may have none. An override that follows it is none."""
    if value and "=" in value:
        args.overrides.append(value)
        return NEWEST
    return value


def _check(args: argparse.Namespace) -> int:
    from distflow.run.check import check

    size = args.memory
    if size and "=" in size:
        args.overrides.append(size)
        size = ""
    if size is None:
        lines = check(_program(args))
    else:
        from distflow.rehearsal.check import check_memory

        lines = check_memory(_program(args), size)
    for line in lines:
        print(printable(line), flush=True)
    return 0


def _gpu_check(args: argparse.Namespace) -> int:
    from distflow.first_hour.table import render, say

    report = api.gpu_check(args.out, args.quick, args.only, args.workers, args.step_limit_s, say)
    _print(render(report))
    print(printable(f"wrote {args.out / 'report.json'} and {args.out / 'report.txt'}"))
    return 0 if report.well else 1


def _export(args: argparse.Namespace) -> int:
    import torch

    dtype = getattr(torch, args.dtype) if args.dtype else None
    names = ("step", "role", "adapter", "base", "ema", "push_to_hub", "private")
    options = {name: getattr(args, name) for name in names}
    print(printable(f"wrote {api.export(args.run, args.out, dtype=dtype, **options)}"))
    if args.push_to_hub:
        print(printable(f"uploaded it to {args.push_to_hub} on the hub"))
    return 0


def _program(args: argparse.Namespace) -> "Program":
    return api.load_program(args.config, _overrides(args), base=getattr(args, "relative_to", None))


def _overrides(args: argparse.Namespace) -> list[str]:
    if args.workers is not None and args.workers < 1:
        raise ConfigError(f"--workers {args.workers}: at least one worker is needed")
    return [*args.overrides, *([] if args.workers is None else [f"workers={args.workers}"])]
