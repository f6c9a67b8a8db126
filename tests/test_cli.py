import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import pytest

from distflow import __version__, cli
from distflow.errors import printable
from distflow.run.program import Program

DIAMOND = str(Path(__file__).parents[1] / "examples" / "diamond" / "config.yaml")
Output = pytest.CaptureFixture[str]


def distflow(*args: str) -> int:
    with pytest.raises(SystemExit) as e:
        cli.main(args)
    assert isinstance(e.value.code, int)
    return e.value.code


def planned(capsys: Output, *args: str) -> dict[str, object]:
    """Returns what `distflow plan --json` prints."""
    assert distflow("plan", DIAMOND, "--json", *args) == 0
    out, err = capsys.readouterr()
    assert err == ""
    plan = json.loads(out)
    assert isinstance(plan, dict)
    return plan


def test_plan_shows_which_rank_runs_what(capsys: Output) -> None:
    assert distflow("plan", DIAMOND) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for word in ("diamond", "4 workers", "generate", "advantage", "rollout 0-1", "train 2-3", "m0"):
        assert word in out
    assert Program.load(DIAMOND).plan(4).hash[:8] in out
    assert max(map(len, out.splitlines())) <= 120
    assert "\x1b" not in out


def test_plan_as_json_has_its_hash(capsys: Output) -> None:
    expected = Program.load(DIAMOND).plan(4)
    assert planned(capsys) == json.loads(json.dumps(expected.to_json() | {"hash": expected.hash}))


@pytest.mark.parametrize("name", ["plan.svg", "new/folder/plan.svg"])
def test_plan_as_a_picture(capsys: Output, tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    assert distflow("plan", DIAMOND, "--svg", str(file)) == 0
    assert capsys.readouterr().out == f"wrote {file}\n"
    assert ElementTree.parse(file).getroot().tag.endswith("svg")


@pytest.mark.parametrize(
    "args",
    [
        ["data.batch=32", "data.repeat=2", "--json"],
        ["--json", "data.batch=32", "data.repeat=2"],
        ["data.batch=32", "--json", "data.repeat=2"],
    ],
)
def test_overrides_may_be_before_and_after_options(capsys: Output, args: list[str]) -> None:
    assert distflow("plan", DIAMOND, *args) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["samples"], plan["samples_per_prompt"]) == (64, 2)


@pytest.mark.parametrize("args", [["--workers", "8"], ["workers=8"], ["workers=6", "--workers", "8"]])
def test_workers_are_the_option_then_the_config(capsys: Output, args: list[str]) -> None:
    assert planned(capsys, *args)["workers"] == 8
    assert planned(capsys)["workers"] == 4


def test_there_is_one_worker_by_default(capsys: Output) -> None:
    assert planned(capsys, "workers=", "placement={}")["workers"] == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["none.yaml"], "there is no config file none.yaml"),
        ([DIAMOND, "data.bacth=3"], "unknown key 'data.bacth'; did you mean 'batch'?"),
        ([DIAMOND, "--json", "batch"], "override 'batch': write it as key=value"),
        ([DIAMOND, "--workers", "0"], "--workers 0: at least one worker is needed"),
        ([DIAMOND, "--workers", "2"], "placement.ranks.train: '2-3' names ranks 2-3, but there are 2 workers (0-1)"),
        ([DIAMOND, "data.files=sum.jsonl"], "sum.jsonl: no such file; did you mean 'sums.jsonl'?"),
        ([DIAMOND, "flow=flow.py:dimond"], "flow: 'flow.py:dimond' has no 'dimond'; did you mean 'diamond'?"),
        ([DIAMOND, "placement.nodes.correct.ranks=rolout"], "unknown rank set 'rolout'; did you mean 'rollout'?"),
        ([DIAMOND, "placement.nodes.corect.tp=2"], "the flow has no node 'corect'; did you mean 'correct'?"),
    ],
)
def test_bad_input_is_reported_in_one_line(capsys: Output, args: list[str], message: str) -> None:
    assert distflow("plan", *args) == 2
    assert one_line(capsys, message)


def one_line(capsys: Output, message: str) -> bool:
    out, err = capsys.readouterr()
    return out == "" and err.startswith("distflow: ") and err.index("\n") == len(err) - 1 and message in err


def test_run_reports_a_mistake_before_any_worker_starts(capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert distflow("run", DIAMOND, "placement.nodes.corect.tp=2") == 2
    assert one_line(capsys, "the flow has no node 'corect'; did you mean 'correct'?")


def test_workers_read_paths_from_where_the_command_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    words: list[str] = []

    def launch(config: object, command: list[str], resume: object, again: list[str]) -> int:
        words.extend(command)
        return 0

    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("distflow.cluster.local.launch", launch)
    config = tmp_path / "config.yaml"
    config.write_text(Path(DIAMOND).read_text())
    assert distflow("run", str(config), "seed=1", "--relative-to", str(Path(DIAMOND).parent)) == 0
    assert words == ["run", str(config), "seed=1", "--relative-to", str(Path(DIAMOND).parent)]


@pytest.mark.parametrize(
    ("name", "reason"),
    [("file/plan.svg", "File exists"), ("file/x/plan.svg", "Not a directory"), ("", "Is a directory")],
)
def test_a_picture_that_cannot_be_written_is_reported_in_one_line(
    capsys: Output, tmp_path: Path, name: str, reason: str
) -> None:
    (tmp_path / "file").touch()
    file = tmp_path / name
    assert distflow("plan", DIAMOND, "--svg", str(file)) == 2
    assert one_line(capsys, f"--svg {file}: cannot be written: {reason}")


@pytest.mark.parametrize(
    "args",
    [
        ["paln", DIAMOND],
        ["plan"],
        ["plan", DIAMOND, "--jsn"],
        ["plan", DIAMOND, "--workers", "many"],
        ["plan", DIAMOND, "--json", "--svg", "x.svg"],
    ],
)
def test_a_wrong_command_line_shows_its_usage(capsys: Output, args: list[str]) -> None:
    assert distflow(*args) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("usage: distflow")
    assert "Traceback" not in err


def test_without_a_command_there_is_help(capsys: Output) -> None:
    assert distflow() == 0
    out, err = capsys.readouterr()
    assert err == ""
    for word in ("plan", "simulate", "run", "check", "eval", "export", "--version", "--print-completion"):
        assert word in out


def test_shells_complete_commands_and_options(capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    for shell in ("bash", "zsh", "tcsh"):
        assert distflow("--print-completion", shell) == 0
        out = capsys.readouterr().out
        assert "distflow" in out
        assert "resume" in out
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert distflow("--print-completion", "bash") == 2
    assert "pip install -e '.[completion]'" in capsys.readouterr().err


def test_the_command_is_also_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "distflow", "plan", "none.yaml"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "distflow: there is no config file none.yaml\n")


def test_the_version_is_that_of_the_package(capsys: Output) -> None:
    assert distflow("--version") == 0
    assert capsys.readouterr().out == f"distflow {__version__}\n"


def test_an_unknown_log_level_is_refused(capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTFLOW_LOG_LEVEL", "debgu")
    assert distflow("plan", DIAMOND) == 2
    assert one_line(capsys, "DISTFLOW_LOG_LEVEL: unknown level 'DEBGU'; did you mean 'DEBUG'?")


def test_names_of_files_cannot_steer_the_terminal(capsys: Output, tmp_path: Path) -> None:
    name = tmp_path / "\x1b[2J\x1b]0;owned\x07\u202e.yaml"
    assert distflow("plan", str(name)) == 2
    text = capsys.readouterr().err
    assert r"\x1b[2J\x1b]0;owned\x07\u202e.yaml" in text
    assert text.rstrip("\n").isprintable()
    assert printable("é\u3000日本 😀\n\ttab") == "é\u3000日本 😀\n\ttab"


INTERRUPTED_IMPORT = """
import os
import signal
import sys


class Interrupt:
    def find_spec(self, name, *rest):
        if name == os.environ["INTERRUPT_AT"]:
            os.kill(os.getpid(), signal.SIGINT)


sys.meta_path.insert(0, Interrupt())
"""


@pytest.mark.parametrize("module", ["distflow.plan", "distflow.cli", "distflow.run.program"])
def test_ctrl_c_while_a_command_starts_is_one_line(tmp_path: Path, module: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTED_IMPORT)
    path = os.pathsep.join([str(tmp_path), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    environment = os.environ | {"PYTHONPATH": path, "INTERRUPT_AT": module}
    heeds = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell's jobs in the background ignore it
    command = [sys.executable, "-m", "distflow", "plan", DIAMOND]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, preexec_fn=heeds)
    assert done.stderr == "distflow: stopped by SIGINT\n"
    assert done.returncode in (-signal.SIGINT, 128 + signal.SIGINT)
    assert done.stdout == ""
