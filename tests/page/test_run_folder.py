"""The folder of a run is shown in whatever state it is, and what is missing is said."""

import json
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distflow.errors import ConfigError
from distflow.page.run_folder import RunFolder
from distflow.plan import Placement, Workload, plan
from distflow.run_folder import METRICS, PLAN, STATE
from distflow.util.owner import Owner
from recorded import FLOW, write_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", steps=6, workers=4)


def test_a_whole_run_lacks_nothing(run: Path) -> None:
    info = RunFolder(run).overview()
    assert info["missing"] == []
    assert (info["state"], info["step"], info["steps"], info["workers"]) == ("finished", 6, 6, 4)
    assert info["steps_recorded"] == [1, 2, 3, 4, 5, 6]
    assert info["headline"][:2] == ["val/all/score", "reward/mean"]
    texts = [w["text"] for w in info["warnings"]]
    assert "62% of groups had no signal in the last 6 steps" in texts
    assert "rank 1 is the slowest in 6 of 6 steps, 1.4 times the mean" in texts


def test_a_killed_run_says_so(run: Path) -> None:
    (run / "state.json").write_text(json.dumps({"state": "running", "steps": 100, "time": 0}))
    assert RunFolder(run).state()["state"] == "killed"


def test_a_run_that_failed_says_why(run: Path) -> None:
    line = [1_790_000_099_000_000, 5, 6, "error", "rank 1, step 6, node 'reward.score': ZeroDivisionError"]
    with open(run / "spans" / "1.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")
    info = RunFolder(run).overview()
    assert info["state"] == "failed"
    assert "ZeroDivisionError" in info["error"]


def test_a_run_that_goes_on_is_read_on(run: Path) -> None:
    folder = RunFolder(run)
    before, table = folder.signature(), folder.samples.table()
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 7, "time": 1, "reward/mean": 0.5}\n{"step": 8, "tim')  # a line is being written
    with open(run / "samples" / "0.jsonl", "a") as file:
        file.write('{"step":7,"id":99,"group":9,"split":"train","fields":{"score":2.0}}\n{"step":8')
    assert folder.signature() != before
    assert folder.metrics()["step"][-1] == 7
    after = folder.samples.table()
    assert after["count"] == table["count"] + 1
    assert (after["step"][-1], after["score"][-1]) == (7, 2.0)
    assert not any("could not be read" in text for text in folder.missing())
    with open(run / "metrics.jsonl", "a") as file:
        file.write('e": 2}\n')
    assert folder.metrics()["step"][-1] == 8


def test_a_log_that_was_truncated_by_a_resumed_run_is_read_anew(run: Path) -> None:
    folder = RunFolder(run)
    assert folder.metrics()["step"][-1] == 6
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.part").write_text("".join(lines[:3]))
    (run / "metrics.part").rename(run / "metrics.jsonl")
    assert folder.metrics()["step"] == [1, 2, 3]


def test_a_run_of_an_older_version_shows_its_metrics(run: Path) -> None:
    for name in ("spans", "samples"):
        shutil.rmtree(run / name)
    for name in ("plan.json", "state.json", "versions.json"):
        (run / name).unlink()
    folder = RunFolder(run)
    info = folder.overview()
    assert info["state"] == "ended"
    assert [text.partition(":")[0] for text in info["missing"]] == ["No spans", "No samples", "No plan"]
    assert folder.plan() == {}
    assert folder.metrics()["step"] == [1, 2, 3, 4, 5, 6]
    assert folder.steps() == []


def test_junk_is_left_out_and_counted(run: Path) -> None:
    with open(run / "metrics.jsonl", "ab") as file:
        file.write(b'not json\n[1]\n{"step": "x"}\n\xff\xfe\n')
    with open(run / "samples" / "0.jsonl", "ab") as file:
        file.write(b'null\n{"step":1}\n{"step":1,"id":"x","group":1,"split":"train","fields":{}}\n')
    with open(run / "spans" / "0.jsonl", "ab") as file:
        file.write(b'[1,2,3]\n["a","b",3,"run","x"]\n')
    (run / "plan.json").write_text('{"nodes": 5}')
    folder = RunFolder(run)
    folder.overview()
    assert "7 lines could not be read and are left out." in folder.missing()
    assert folder.plan() == {}
    assert folder.step(3).ranks == [0, 1, 2, 3]


def test_links_out_of_the_folder_are_not_followed(run: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.yaml").write_text("password: hunter2")
    (run / "config.yaml").unlink()
    (run / "config.yaml").symlink_to(tmp_path / "secret.yaml")
    assert "hunter2" not in json.dumps(RunFolder(run).overview())
    inner = run / "samples" / "7.jsonl"
    (tmp_path / "other.jsonl").write_text(
        '{"step":1,"id":5,"group":1,"split":"train","fields":{"response":"hunter2"}}\n'
    )
    inner.symlink_to(tmp_path / "other.jsonl")
    assert "hunter2" not in json.dumps(RunFolder(run).samples.table())


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not the folder of a run"):
        RunFolder(tmp_path)


def test_the_plan_has_lanes_and_says_how_each_field_gets_there(run: Path) -> None:
    plan = RunFolder(run).plan()
    assert [lane["name"] for lane in plan["lanes"]] == ["rollout", "train"]
    places = {n["id"]: (n["lane"], n["column"]) for n in plan["nodes"]}
    assert places["data"] == (0, 0)
    assert places["actor.update"][0] == 1
    arcs = {(a["from"], a["to"]): a for a in plan["arcs"]}
    assert arcs["data", "actor.generate"]["kind"] == "local"
    assert arcs["actor.generate", "actor.update"]["kind"] == "move"
    assert arcs["actor.update", "actor.generate"]["kind"] == "weights"


def test_a_run_between_two_steps_is_running_while_its_launcher_lives(run: Path) -> None:
    """Steps of a real model take minutes; what was written last is old then."""
    (run / STATE).write_text(json.dumps({"state": "running", "steps": 100, "time": 0}))
    assert RunFolder(run).state()["state"] == "killed"
    with Owner(run):
        assert RunFolder(run).state()["state"] == "running"
    assert RunFolder(run).state()["state"] == "killed"


@pytest.mark.parametrize(("minutes_ago", "word"), [(8, "running"), (12, "killed")])
def test_a_run_of_another_host_is_given_the_time_of_some_steps(run: Path, minutes_ago: float, word: str) -> None:
    (run / STATE).write_text(json.dumps({"state": "running", "steps": 100, "time": 0}))
    row = {"step": 7, "time": time.time() - 60 * minutes_ago, "timing_max_s/step": 200.0}
    with open(run / METRICS, "a") as file:
        file.write(json.dumps(row) + "\n")
    assert RunFolder(run).state()["state"] == word


@pytest.mark.parametrize("kind", ["metrics", "samples"])
def test_requests_that_race_read_each_line_once_and_in_order(
    run: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second request comes while the first one is at its first line."""
    folder, second = RunFolder(run), list[threading.Thread]()
    request = folder.metrics if kind == "metrics" else folder.samples.table
    alone = RunFolder(run).samples.table()

    def parse_slowly(line: bytes) -> Any:
        if not second:
            second.append(threading.Thread(target=request))
            second[0].start()
            second[0].join(0.5)
        return json.loads(line)

    monkeypatch.setattr("distflow.page.run_folder.parse", parse_slowly)
    monkeypatch.setattr("distflow.page.sample_index.parse", parse_slowly)
    request()
    second[0].join()
    assert folder.metrics()["step"] == [1, 2, 3, 4, 5, 6]
    assert folder.samples.table() == alone
    lines = [len(row.lines) for row in folder.samples._update().values()]
    assert lines == [2] * len(lines)  # one of each worker that has a part of it


@pytest.mark.parametrize("call", ["actor.generate", "actor.converse"])
def test_weights_go_to_every_node_that_generates(run: Path, call: str) -> None:
    rollout, *others = FLOW.nodes
    flow = replace(FLOW, nodes=(replace(rollout, id=call, call=call), *others))
    (run / PLAN).write_text(json.dumps(plan(flow, Placement(2), Workload(4, 2)).to_json()))
    weights = [(a["from"], a["to"]) for a in RunFolder(run).plan()["arcs"] if a["kind"] == "weights"]
    assert weights == [("actor.update", call)]


def test_what_is_not_a_default_and_which_checkpoints_there_are(run: Path) -> None:
    config = "flow: grpo\nname: grpo\nsteps: 8\ndata: {files: [a.jsonl], batch: 64}\ntrain: {lr: 0.001, eps: 1.0e-08}\n"
    (run / "config.yaml").write_text(config)
    for step in (4, 2):
        (run / "checkpoints" / f"step_{step}").mkdir(parents=True)
        (run / "checkpoints" / f"step_{step}" / "complete.json").touch()
    (run / "checkpoints" / "step_6").mkdir()  # being written
    (run / "checkpoints" / "best").write_text("2\n")
    info = RunFolder(run).overview()
    assert info["changed"] == ["flow", "data.files", "steps", "name", "train.lr"]  # not data.batch, not train.eps
    assert [(c["step"], c["best"]) for c in info["checkpoints"]] == [(2, True), (4, False)]
    (run / "config.yaml").write_text("flow: grpo\nof_another_version: 1\n")
    assert RunFolder(run).overview()["changed"] is None


def test_warnings_are_told_with_their_steps(run: Path) -> None:
    warned = {w["metric"]: w["ranges"] for w in RunFolder(run).overview()["warned"]}
    assert warned["reward/zero_std_frac"] == [[1, 6]]
    assert warned["perf/straggle"] == [[3, 6]]  # it takes three steps to be sure
