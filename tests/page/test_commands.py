"""`distflow trace` and `distflow runs`, and `show` on what is no run."""

import json
import re
from pathlib import Path

import pytest

from distflow.cli import main
from distflow.observe.spans import span_line
from distflow.page.run_folder import RunFolder
from distflow.page.runs import resume, runs_at
from recorded import write_run


def command(*words: str) -> int | str | None:
    with pytest.raises(SystemExit) as end:
        main(list(words))
    return end.value.code


def test_a_trace_has_a_process_per_rank_and_every_span(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=3, workers=2)
    assert command("trace", str(run)) == 0
    trace = json.loads((run / "trace.json").read_text())
    events = trace["traceEvents"]
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {"rank 0", "rank 1"}
    lines = sum(len((run / "spans" / f"{r}.jsonl").read_text().splitlines()) for r in range(2))
    whole = [e for e in events if e["ph"] == "X"]
    assert len(whole) == lines
    assert all(e["ts"] > 0 and e["dur"] >= 0 for e in whole)
    assert {e["cat"] for e in whole} == {"load", "weights", "call", "inference", "move", "train", "control", "step"}


def test_spans_that_touch_do_not_overlap_in_a_trace(tmp_path: Path) -> None:
    """Perfetto drops what overlaps something on its thread, and times are rounded to microseconds."""
    run = write_run(tmp_path / "run", workers=1)
    spans = [(100, 50, 1, "train", "update"), (101, 51, 1, "step", ""), (150, 51, 2, "train", "update")]
    spans.append((150, 50, 2, "step", ""))
    (run / "spans" / "0.jsonl").write_bytes(b"".join(span_line(*span, {}) for span in spans))
    assert command("trace", str(run)) == 0
    events = [e for e in json.loads((run / "trace.json").read_text())["traceEvents"] if e["ph"] == "X"]
    for thread in {e["tid"] for e in events}:
        first, second = (e for e in events if e["tid"] == thread)
        assert first["ts"] + first["dur"] == second["ts"]
        assert second["ts"] + second["dur"] == 150


def test_runs_are_listed_with_state_score_and_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # short names, which fit in a row
    write_run(tmp_path / "a" / "done", steps=4)
    killed = write_run(tmp_path / "b", steps=4, state="running")
    (killed / "checkpoints" / "step_2").mkdir(parents=True)
    (killed / "checkpoints" / "step_2" / "complete.json").touch()
    (killed / "checkpoints" / "step_4").mkdir()  # it was killed while it wrote this one
    (tmp_path / "grpo.yaml").touch()
    started = {"command": ["/usr/bin/distflow", "run", "grpo.yaml", "seed=1"], "folder": str(tmp_path), "base": "there"}
    (killed / "run.json").write_text(json.dumps(started))
    assert command("runs", ".") == 0
    out = capsys.readouterr().out
    assert re.search(r"a/done +finished +4/4 +val/all/score 1 ", out)
    assert re.search(r"b +killed +4/4 .*distflow run grpo.yaml seed=1 --resume", out)
    (tmp_path / "grpo.yaml").unlink()  # as after a run from Python, whose config was in memory
    assert resume(RunFolder(Path("b")), "killed") == "distflow run b/config.yaml --relative-to there --resume"


def test_a_folder_is_shown_with_all_runs_in_it(tmp_path: Path) -> None:
    for name in ("one", "deep/two"):
        write_run(tmp_path / name, steps=2)
    (write_run(tmp_path / "simulated", steps=1) / "metrics.jsonl").unlink()
    assert [run.name for run in runs_at(tmp_path)] == ["two", "one", "simulated"]
    assert [run.name for run in runs_at(tmp_path / "one")] == ["one"]
    assert command("show", str(tmp_path), "--html", str(tmp_path / "runs.html")) == 0


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    assert command("show", str(tmp_path)) == 2
    assert command("runs", str(tmp_path)) == 2
    assert command("runs", str(tmp_path / "nothing")) == 2
    run = write_run(tmp_path / "run")
    for file in (run / "spans").iterdir():
        file.unlink()
    assert command("trace", str(run)) == 2
    assert command("show", str(run), "--port", "99999") == 2
    assert command("show", str(run), "--html", str(tmp_path)) == 2
