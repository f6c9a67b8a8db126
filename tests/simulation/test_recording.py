"""A simulated step as the folder of a run, which the page shows."""

from pathlib import Path

import yaml

from distflow.page.run_folder import RunFolder
from test_cli import distflow

CONFIG = {
    "flow": "grpo",
    "model": {"arch": "qwen2", "hidden": 1024, "layers": 8},
    "data": {"files": "rows.jsonl", "batch": 64},
    "reward": "reward.py:score",
    "rollout": {"n": 8, "max_tokens": 512},
    "placement": {
        "ranks": {"rollout": "0-5", "train": "6-7"},
        "nodes": {"actor.generate": {"ranks": "rollout"}, "actor.update": {"ranks": "train"}},
    },
}


def test_a_recorded_simulation_is_shown_as_one_with_its_critical_path(tmp_path: Path) -> None:
    config, folder = tmp_path / "c.yaml", tmp_path / "step"
    config.write_text(yaml.safe_dump(CONFIG))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "reward.py").write_text("def score(solution_str): return 0.0\n")
    options = ["--workers", "8", "--hardware", "h100", "--record", str(folder)]
    assert distflow("simulate", str(config), *options) == 0
    run = RunFolder(folder)
    info = run.overview()
    assert (info["state"], info["workers"], info["steps_recorded"]) == ("simulated", 8, [1])
    assert info["missing"] == ["A simulated step: it has no metrics and no samples."]
    view = run.step(1)
    on_path = {row["name"]: row["critical_us"] / (view.end - view.start) for row in view.nodes()}
    assert on_path["actor.generate"] > 0.5  # most of the step, also for the ranks that are idle meanwhile
    assert on_path["actor.update"] > 0.01
