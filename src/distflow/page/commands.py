"""The commands that look at runs: `distflow show`, `trace`, `runs`. They need neither torch nor the run's config."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distflow.errors import ConfigError
from distflow.util.text import human_bytes


def add_commands(commands: Any) -> None:
    """Adds the commands to the command line's parser."""

    def add(name: str, function: Callable[[argparse.Namespace], int], help: str) -> argparse.ArgumentParser:
        command: argparse.ArgumentParser = commands.add_parser(name, help=help, description=help)
        command.set_defaults(command=function, overrides=[])
        return command

    show = add("show", _show, "Show a run in a browser: plan, timeline, traffic, curves, samples.")
    show.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folders of runs, or one with runs in it")
    show.add_argument("--port", type=int, metavar="P", help="on this machine only; default: 8265 or a free one")
    form = show.add_mutually_exclusive_group()
    form.add_argument("--follow", action="store_true", help="update the page while the run goes on")
    form.add_argument("--html", type=Path, metavar="FILE", help="write the page as one file instead")
    trace = add("trace", _trace, "Export what workers did when, for Perfetto or chrome://tracing.")
    trace.add_argument("run", type=Path, metavar="RUN", help="the folder of a run")
    trace.add_argument("--out", type=Path, metavar="FILE", help="default: trace.json in the run's folder; -: print it")
    runs = add("runs", _runs, "List the runs in a folder: state, last score, how to go on.")
    runs.add_argument("folder", type=Path, nargs="?", default=Path("runs"), metavar="DIR", help="default: runs")


def _show(args: argparse.Namespace) -> int:
    from distflow.page.runs import runs_at

    runs = [run for path in args.runs for run in runs_at(path)]
    if args.html:
        from distflow.page.html_file import html_file

        text = html_file(runs)
        _write(args.html, text)
        print(f"wrote {args.html}, {human_bytes(len(text.encode()))}")
        return 0
    from distflow.page.server import serve

    serve(runs, args.port, args.follow)
    return 0


def _trace(args: argparse.Namespace) -> int:
    from io import StringIO

    from distflow.page.run_folder import RunFolder
    from distflow.page.trace import write_trace

    run = RunFolder(args.run)
    if not run.ranks():
        raise ConfigError(f"{args.run}: has no spans; it was recorded by an older version, or with record.spans=false")
    if str(args.out) == "-":
        write_trace(run, sys.stdout)
        return 0
    out, text = args.out or args.run / "trace.json", StringIO()
    count = write_trace(run, text)
    _write(out, text.getvalue())
    print(f"wrote {out}, {count} events; open it in https://ui.perfetto.dev or chrome://tracing")
    return 0


def _runs(args: argparse.Namespace) -> int:
    from rich.console import Console

    from distflow.page.runs import runs_table

    table = runs_table(args.folder)
    if not table.row_count:
        raise ConfigError(f"{args.folder}: there is no run in it")
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    return 0


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as e:
        raise ConfigError(f"{path}: cannot be written: {e.strerror}") from None
