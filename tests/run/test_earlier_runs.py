"""A new run in the folder of an earlier one keeps that as a whole; a resumed run says what is not as it was."""

import json
from pathlib import Path

import pytest
import yaml

from distflow.config.loading import make_config
from distflow.errors import ConfigError
from distflow.page.runs import find_runs
from distflow.run.check import reference_answer
from distflow.run.earlier_runs import keep_earlier_run, say_changes

Log = pytest.LogCaptureFixture


def ended_run(folder: Path, mark: str) -> None:
    (folder / "checkpoints/step_2").mkdir(parents=True)
    for name in ("config.yaml", "run.json", "metrics.jsonl", "rewards.log"):
        (folder / name).write_text(mark)


def test_an_earlier_run_is_kept_as_a_whole_and_found(tmp_path: Path, caplog: Log) -> None:
    run = tmp_path / "run"
    run.mkdir()
    caplog.set_level("INFO")
    keep_earlier_run(run)
    assert not caplog.text
    for n in (1, 2):
        ended_run(run, mark := json.dumps({"step": n}))
        keep_earlier_run(run)
        kept = run / "earlier" / str(n)
        assert [p.name for p in run.iterdir()] == ["earlier"]
        assert {p.read_text() for p in kept.iterdir() if p.is_file()} == {mark}
        assert (kept / "checkpoints/step_2").is_dir()
        assert f"the earlier run in {run} is kept in {kept}" in caplog.text
    ended_run(run, "{}")
    assert [r.path for r in find_runs(tmp_path)] == [run, run / "earlier/1", run / "earlier/2"]


def test_an_earlier_run_that_cannot_be_moved_is_not_mixed_with_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')

    def refuse(self: Path, target: Path) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(ConfigError, match=r"^run_dir: .*metrics.jsonl of an earlier run cannot be moved .*Read-only"):
        keep_earlier_run(tmp_path)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([], ""),
        (["run_dir=elsewhere"], ""),
        (["train.lr=1e-5", "steps=3"], "steps 285 → 3, train.lr 1e-06 → 1e-05"),
        (["algo.kl=0.1"], "algo.kl unset → 0.1"),
        (["eval=held.jsonl", "eval.every=5"], 'eval.files unset → ["held.jsonl"], eval.every unset → 5'),
    ],
)
def test_a_resumed_run_says_what_changed(tmp_path: Path, caplog: Log, overrides: list[str], said: str) -> None:
    raw = {"flow": "grpo", "data": "rows.jsonl", "steps": 285, "model": "a/b"}
    before = make_config(dict(raw), (), Path(), "", "")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(before.model_dump(mode="json")))
    caplog.set_level("INFO")
    say_changes(tmp_path, make_config(dict(raw), overrides, Path(), "", ""))
    assert said in caplog.text
    assert bool(caplog.text) == bool(said)


def test_a_config_that_cannot_be_read_says_nothing(tmp_path: Path, caplog: Log) -> None:
    config = make_config({"flow": "grpo", "data": "rows.jsonl"}, (), Path(), "", "")
    for text in ("{", "3", "flow: {a: 1}", None):
        if text is not None:
            (tmp_path / "config.yaml").write_text(text)
        say_changes(tmp_path if text is not None else tmp_path / "none", config)
    assert not caplog.text


@pytest.mark.parametrize(
    ("row", "column", "answer"),
    [
        ({"reward_model": {"ground_truth": "7"}, "answer": "8"}, None, "7"),
        ({"answer": 8, "right": "9"}, "right", "9"),
        ({"answer": 8}, None, "8"),
        ({"prompt": "x"}, None, "The answer is 42."),
    ],
)
def test_a_check_answers_as_the_row_says(row: dict[str, object], column: str | None, answer: str) -> None:
    assert reference_answer(row, column) == answer
