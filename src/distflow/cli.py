"""`distflow plan` shows who will do what, `distflow run` does it. Nothing heavy is imported before it is needed."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from distflow.errors import ConfigError, DistflowError, cut
from distflow.launch import NEWEST, RESUME
from distflow.run.program import Program


def main(argv: Sequence[str] | None = None) -> None:
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    for word in rest:  # overrides may also follow an option
        if word.startswith("-") or args.command is _export:
            parser.error(f"unknown {'option' if word.startswith('-') else 'word'} {cut(word)}")
        args.overrides.append(word)
    try:
        sys.exit(args.command(args))
    except DistflowError as e:
        print(f"distflow: {e}", file=sys.stderr)
        sys.exit(2)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "distflow", description="RL post-training as a graph, run by N workers with no centre."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, function: object, help: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=help, description=help)
        sub.set_defaults(command=function)
        sub.add_argument("config", metavar="CONFIG", help="YAML file")
        sub.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="dotted overrides, e.g. data.batch=64")
        sub.add_argument("--workers", type=int, metavar="N", help="number of workers, instead of the config's")
        return sub

    plan = command("plan", _plan, "Show the plan: who does what, and what moves.")
    form = plan.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print it as JSON")
    form.add_argument("--svg", metavar="FILE", type=Path, help="draw it")
    run = command("run", _run, "Run it: on this machine, or as one worker of torchrun, Slurm or Kubernetes.")
    run.add_argument(
        "--resume",
        nargs="?",
        const=NEWEST,
        metavar="PATH",
        help="go on from the newest whole checkpoint of the run, or from this one (or of this run)",
    )
    command("check", _check, "Try everything that can be tried without training: data, model, one reward, memory.")
    command("eval", _eval, "Judge the model on the held-out set of the config, without training.")
    export = commands.add_parser("export", help="Write a run's weights as a Hugging Face directory.")
    export.set_defaults(command=_export, overrides=[])
    export.add_argument("run", type=Path, metavar="RUN", help="the folder of a run")
    export.add_argument("out", type=Path, metavar="OUT", help="a directory that is new or empty")
    export.add_argument("--step", type=int, metavar="N", help="the weights after this step, instead of the newest")
    export.add_argument("--role", metavar="ROLE", help="another model of the run than the actor, such as critic")
    export.add_argument("--adapter", action="store_true", help="only the adapter of train.lora, as PEFT writes it")
    export.add_argument("--base", metavar="MODEL", help="where the model of an adapter is now, if it was moved")
    return parser


def _plan(args: argparse.Namespace) -> int:
    from rich.console import Console

    from distflow.plan.svg import svg
    from distflow.plan.table import render

    program = _program(args)
    plan = program.plan(program.config.workers or 1)
    if args.json:
        print(json.dumps(plan.to_json() | {"hash": plan.hash}, indent=2))
    elif args.svg:
        try:
            args.svg.parent.mkdir(parents=True, exist_ok=True)
            args.svg.write_text(svg(plan))
        except OSError as e:
            raise ConfigError(f"--svg {args.svg}: cannot be written: {e.strerror}") from None
        print(f"wrote {args.svg}")
    else:
        Console(width=None if sys.stdout.isatty() else 120).print(render(plan))
    return 0


def _run(args: argparse.Namespace) -> int:
    where = getattr(args, "resume", None)
    if where and "=" in where:  # an override that stands behind --resume
        args.overrides.append(where)
        where = NEWEST
    if where:
        os.environ[RESUME] = where
    program = _program(args)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:  # somebody has started us as one of many
        from distflow.launch.process import run_worker

        return run_worker(program)
    program.plan(program.config.workers or 1)  # a mistake is told here, once, before any worker starts
    from distflow.launch.local import launch

    return launch(program.config, args.config, args.overrides)


def _check(args: argparse.Namespace) -> int:
    from distflow.run.check import check

    for line in check(_program(args)):
        print(line, flush=True)
    return 0


def _eval(args: argparse.Namespace) -> int:
    config = _program(args).config
    if config.eval is None:
        raise ConfigError(f"{args.config}: has no `eval` section; add one: `eval: held-out.jsonl`")
    args.overrides.append("steps=0")
    if not any(o.startswith("run_dir=") for o in args.overrides):
        args.overrides.append(f"run_dir={config.run_folder}-eval")
    return _run(args)


def _export(args: argparse.Namespace) -> int:
    from distflow.run.export import export, export_adapter

    if args.adapter:
        out = export_adapter(args.run, args.out, args.step, args.role)
    else:
        out = export(args.run, args.out, args.step, args.role, args.base)
    print(f"wrote {out}")
    return 0


def _program(args: argparse.Namespace) -> Program:
    overrides = list(args.overrides)
    if args.workers is not None:
        if args.workers < 1:
            raise ConfigError(f"--workers {args.workers}: at least one worker is needed")
        overrides.append(f"workers={args.workers}")
    return Program.load(args.config, overrides)
