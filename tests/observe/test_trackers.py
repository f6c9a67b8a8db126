"""Trackers get our metrics, and never get in the way. Each real one is tested where its package is installed."""

import importlib
import json
import logging
import struct
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from distflow.config.schema import TrackerName
from distflow.errors import ConfigError
from distflow.observe.trackers import NAMES, check_installed, start_trackers
from distflow.observe.trackers import thread as tracker_thread
from distflow.observe.trackers.thread import TrackerThread
from distflow.observe.trackers.to_tensorboard import TensorBoard
from distflow.observe.trackers.tracker import RunInfo, sample_rows
from distflow.util import patient_files
from limits import load_factor

METRICS = [{"reward/mean": 0.125 * step, "val/all/pass@2": 0.5, "actor/lr": 1e-6} for step in (1, 2, 3)]
SAMPLE = {"step": 3, "id": 7, "group": 1, "split": "train", "fields": {"prompt": "p", "response": "r|\n", "score": 1.0}}


class Recorded:
    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.closed = False

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.logged.append((step, dict(metrics)))

    def samples(self, step: int, rows: Sequence[Sequence[Any]]) -> None:
        pass

    def close(self) -> None:
        self.closed = True


def test_the_names_of_the_config_are_those_that_there_are() -> None:
    assert get_args(TrackerName) == NAMES


def test_a_tracker_gets_all_that_is_a_number() -> None:
    tracker = Recorded()
    thread = TrackerThread("mine", lambda: tracker)
    thread.log(1, {"a": 1.0, "b": float("nan")})
    thread.close()
    assert tracker.logged == [(1, {"a": 1.0})]
    assert tracker.closed


@pytest.fixture
def warned() -> Iterator[list[str]]:
    """What trackers warn of; wherever earlier tests have sent the messages of the package."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    for logger in (tracker_thread.logger, patient_files.logger):
        logger.addHandler(handler)
    yield messages
    for logger in (tracker_thread.logger, patient_files.logger):
        logger.removeHandler(handler)


def test_a_tracker_that_cannot_be_opened_is_tried_again(warned: list[str]) -> None:
    tracker, tries = Recorded(), 0

    def opens() -> Recorded:
        nonlocal tries
        tries += 1
        if tries < 4:
            raise ConnectionError("no route to the tracker")
        return tracker

    thread = TrackerThread("mine", opens)
    for step in range(100):
        thread.log(step, {"a": 1.0})
    thread.close()
    assert tries == 4
    assert [step for step, _ in tracker.logged] == list(range(6, 100))  # after 1, 2 and 4 entries
    assert warned == [
        "track: mine: cannot be written (no route to the tracker); the run goes on and tries it again",
        "track: mine: is written again, after 3 failed writes (no route to the tracker); 6 entries are lost",
    ]


def test_a_tracker_that_fails_gets_the_next_entry(warned: list[str]) -> None:
    class Failing(Recorded):
        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            if step >= 5:
                raise OSError(28, "No space left on device")
            super().log(step, metrics)

    tracker = Failing()
    thread = TrackerThread("mine", lambda: tracker)
    for step in (1, 7, 8, 2, 9):
        thread.log(step, {"a": 1.0})
    thread.close()
    assert [step for step, _ in tracker.logged] == [1, 2]
    assert tracker.closed
    reason = "track: mine: cannot be written (No space left on device); the run goes on and tries it again"
    assert warned == [
        reason,
        "track: mine: is written again, after 2 failed writes (No space left on device); 2 entries are lost",
        reason,
        "track: mine: could not be written up to the end of the run (No space left on device); 3 entries are lost",
    ]


def test_a_tracker_that_is_slow_is_not_waited_for(warned: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracker_thread, "CLOSE_LIMIT_S", 0.1)
    stuck, entered = threading.Event(), threading.Event()

    class Stuck(Recorded):
        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            entered.set()
            stuck.wait(60 * load_factor())

    thread = TrackerThread("mine", Stuck)
    thread.log(0, {"a": 1.0})
    assert entered.wait(10 * load_factor())
    for step in range(tracker_thread.MAX_BACKLOG + 5):
        thread.log(step, {"a": 1.0})  # returns at once
    thread.close()
    stuck.set()
    assert warned == [
        "track: mine has not finished in 0 s; what is left is lost",
        "track: mine was too slow; 5 entries were dropped",
    ]


def test_a_package_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distflow.observe.trackers.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"track: wandb is not installed; pip install -e '\.\[wandb\]'"):
        check_installed(["wandb"])


def test_a_sample_is_a_row_of_plain_values() -> None:
    rows = sample_rows([{**SAMPLE, "fields": {"prompt": [{"role": "user"}], "score": None, "advantage": [1.0]}}])
    assert rows == [["train", 7, "[{'role': 'user'}]", None, None, "[1.0]"]]


@pytest.mark.parametrize("first", [0, 2])
def test_events_of_steps_that_a_resumed_run_repeats_are_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    """TensorBoard hides those from `purge_step` on, so it is the first step that comes again."""
    made: list[tuple[str, int | None]] = []
    writer = SimpleNamespace(SummaryWriter=lambda folder, purge_step: made.append((folder, purge_step)))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", writer)
    TensorBoard(RunInfo("a run", tmp_path, {}, first))
    assert made == [(str(tmp_path / "tensorboard"), 3 if first else None)]


def test_a_resumed_run_is_the_same_run_for_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []
    fake = SimpleNamespace(init=lambda **options: made.append(options), Settings=lambda **options: options)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.delitem(sys.modules, "distflow.observe.trackers.to_wandb", raising=False)
    module = importlib.import_module("distflow.observe.trackers.to_wandb")
    for folder, first in (("one", 0), ("one", 4), ("other", 0)):
        module.open_tracker(RunInfo("a run", tmp_path / folder, {}, first))
    settings = {"project": "math", "name": "mine", "entity": "us", "group": None, "tags": ["lr"]}
    module.open_tracker(RunInfo("a run", tmp_path, {}, settings=settings))
    named = made.pop()
    assert {k: v for k, v in named.items() if k in settings} == {k: v for k, v in settings.items() if v}
    del sys.modules["distflow.observe.trackers.to_wandb"]  # others import it with the real package
    new, resumed, other = made
    assert {(m["project"], m["name"]) for m in made} == {("distflow", "a run")}
    assert new["id"] == resumed["id"] != other["id"]
    assert [m["resume"] for m in made] == [None, "allow", None]  # a new run in a used folder does not go on there


def track(name: str, folder: Path, metrics: Sequence[Mapping[str, float]] = METRICS, first: int = 0) -> None:
    """Tracks a run, or the rest of one that is resumed after the step `first`.

    Beside load some trackers need longer to start and to write than a run waits for them.
    """
    pytest.importorskip(name, reason=f"{name} is not installed")
    (thread,) = start_trackers({name: {}}, RunInfo("a run", folder, {"flow": "grpo", "data": {"batch": 4}}, first))
    for step, row in enumerate(metrics, first + 1):
        thread.log(step, row)
    thread.samples(first + len(metrics), [SAMPLE])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tracker_thread, "CLOSE_LIMIT_S", 300.0)
        thread.close()
    assert not thread._thread.is_alive()
    assert not thread._errors.lost


def test_tensorboard_has_our_values(tmp_path: Path) -> None:
    track("tensorboard", tmp_path)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    for name in METRICS[0]:
        expected = [(step, pytest.approx(m[name])) for step, m in enumerate(METRICS, 1)]
        assert [(e.step, e.value) for e in events.Scalars(name)] == expected
    assert "samples/text_summary" in events.Tags()["tensors"]


def test_a_resumed_run_has_each_step_once_in_tensorboard(tmp_path: Path) -> None:
    other = [{name: value + 1 for name, value in row.items()} for row in METRICS]
    track("tensorboard", tmp_path)
    track("tensorboard", tmp_path, other[1:], first=1)  # steps 2 and 3 again
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    for name in METRICS[0]:
        expected = [(1, METRICS[0][name]), (2, other[1][name]), (3, other[2][name])]
        assert [(e.step, e.value) for e in events.Scalars(name)] == [(s, pytest.approx(v)) for s, v in expected]


def test_wandb_has_our_values_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    track("wandb", tmp_path)
    import wandb
    from wandb.proto import wandb_internal_pb2

    wandb.teardown()  # what a program does when it ends: until then W&B's own process may not have written everything
    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    rows: list[dict[str, Any]] = []
    for data in wandb_records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            rows.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item})
    assert [{k: row[k] for k in METRICS[0]} for row in rows] == METRICS
    assert list(tmp_path.glob("wandb/offline-run-*/files/media/table/*.json"))


def wandb_records(data: bytes) -> Iterator[bytes]:
    """The records of W&B's file: blocks of 32 KiB, in them parts with a checksum, a length and which part it is."""
    at, record = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack("<4xHB", data[at : at + 7])
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def test_mlflow_has_our_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    track("mlflow", tmp_path)
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path.resolve() / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("distflow").experiment_id])
    for name in METRICS[0]:
        history = client.get_metric_history(run.info.run_id, name.replace("@", "_at_"))
        assert [(m.step, m.value) for m in history] == [(step, m[name]) for step, m in enumerate(METRICS, 1)]
    assert list(tmp_path.glob("mlflow/**/samples/step_3.json"))


def test_trackio_has_our_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    track("trackio", tmp_path)
    from trackio.sqlite_storage import SQLiteStorage

    rows = [row for row in SQLiteStorage.get_logs("distflow", "a run") if "reward/mean" in row]
    assert [(row["step"], {k: row[k] for k in METRICS[0]}) for row in rows] == list(enumerate(METRICS, 1))
