"""Command lines: each ends with exit code 0, or with a message and another code; never with a traceback."""

import contextlib
import io
import os
import shutil
from pathlib import Path
from random import Random
from unittest import mock

from distflow import cli
from distflow.cluster import local
from fuzz.configs import CODE, ROW
from fuzz.harness import Case
from fuzz.junk import TEXTS, as_yaml

COMMANDS = ("plan", "plan", "run", "check", "eval", "export", "train", "", "--help", "-h")
OPTIONS = (
    "--json", "--svg", "--workers", "--workers=2", "--workers=0", "--workers=-1", "--workers=x",
    "--workers=99999999999", "--resume", "--resume=x", "--step", "--step=3", "--step=x", "--role", "--role=actor",
    "--adapter", "--base", "--base=x", "--nothing", "-j", "--", "-", "--svg=out.svg", "--svg=.", "--svg=/proc/x",
    "--svg=" + "a" * 300, "--js",
)  # fmt: skip
OVERRIDES = (
    "steps=3",
    "data.batch=2",
    "data.batch=x",
    "workers=2",
    "flow=",
    "=",
    "a.b.c=1",
    'name="\\0"',
    "run_dir=run.yaml",
    "run_dir=run.yaml/x",
    "wait_limit_s=1e300",
    "data.files=none",
)

ARGUMENTS = tuple(t for t in TEXTS if "\0" not in t and "\ud800" not in t)  # a shell cannot pass others


class Words:
    name, quick, full = "words", 100, 1500

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "own.py").write_text(CODE)
        (folder / "rows.jsonl").write_text('{"text": "a"}\n' * 4)
        (folder / "run.yaml").write_text(as_yaml({"flow": "own.py:count", "data": {"files": "rows.jsonl", "batch": 4}}))
        (folder / "bad.yaml").write_text("flow: [")
        (folder / "full").mkdir()
        (folder / "full" / "x").write_text(str(ROW))
        (folder / "none" / "checkpoints" / "step_x").mkdir(parents=True)
        (folder / "odd" / "checkpoints" / "step_²").mkdir(parents=True)
        (folder / "odd" / "checkpoints" / "step_²" / "complete.json").write_text("{}")
        (folder / "torn" / "checkpoints" / "step_3").mkdir(parents=True)
        (folder / "torn" / "checkpoints" / "step_3" / "complete.json").write_text('{"lists": {"a": 1}}')
        self.paths = tuple(
            str(folder / n) for n in ("run.yaml", "run.yaml", "run.yaml", "bad.yaml", "none.yaml", "full")
        )
        self.runs = tuple(str(folder / n) for n in ("none", "odd", "torn", "full", "nowhere", "run.yaml"))

    def close(self) -> None:
        pass

    def case(self, rng: Random, number: int) -> Case:
        command = rng.choice(COMMANDS)
        many = (*self.paths, *self.runs) if command == "export" else self.paths
        words = [command]
        if rng.random() < 0.9:
            words.append(rng.choice(self.runs if command == "export" else self.paths))
        if command == "export" and rng.random() < 0.8:
            words.append(str(self.folder / rng.choice(("new", "full", "run.yaml", "a" * 300, "run.yaml/x"))))
        for _ in range(rng.choice((0, 1, 1, 2, 3))):
            word = rng.choice((rng.choice(OPTIONS), rng.choice(OVERRIDES), rng.choice(ARGUMENTS), rng.choice(many)))
            words.insert(rng.randrange(len(words) + 1) if rng.random() < 0.2 else len(words), word)

        def run() -> None:
            out, err = io.StringIO(), io.StringIO()
            before = os.getcwd()
            os.chdir(self.folder)
            try:
                with (
                    contextlib.redirect_stdout(out),
                    contextlib.redirect_stderr(err),
                    mock.patch.object(local, "_run_workers", return_value=None),
                    mock.patch.dict(os.environ),
                ):
                    try:
                        cli.main(words)
                    except SystemExit as e:
                        code = e.code
            finally:
                os.chdir(before)
                shutil.rmtree(self.folder / "new", ignore_errors=True)
            assert isinstance(code, int), code
            assert code in (0, 1, 2), code
            assert (code == 0) == (not err.getvalue().strip()), (code, err.getvalue()[:300], out.getvalue()[:300])
            assert "Traceback" not in err.getvalue()
            assert len(err.getvalue()) < 3000 + sum(map(len, words)), err.getvalue()[:300]

        return Case(f"distflow {words}", run, ("never refused",))
