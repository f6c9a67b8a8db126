"""A run that was ended and resumed is the run that was not: the same curve and weights, whatever the workers."""

import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from distflow.run.checkpoint import damage, load_whole, steps_there
from warm import Ended, distflow_run

PROMPTS = [f"{'so ' * (i % 5)}what is {i} + {i * i % 17}?" for i in range(20)]
REWARD = """
def any_digit(solution_str):
    return float(any(c in "1234" for c in solution_str))
"""
# 20 rows, 8 a step: an epoch ends in the middle of a step, and step 5 begins one.
CONFIG: dict[str, Any] = {
    "flow": "grpo",
    "data": {"files": "data.jsonl", "batch": 8},
    "steps": 8,
    "algo": {"kl": 0.01},
    "model": {"arch": "qwen2", "hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2},
    "rollout": {"n": 4, "max_tokens": 12},
    "train": {"lr": 1e-3, "warmup": 3, "schedule": "linear"},
    "reward": "reward.py:any_digit",
    "eval": {"files": "data.jsonl", "every": 3, "limit": 4},
    "checkpoint": {"every": 2, "keep": 10},
    "wait_limit_s": 60,
}
FLOWS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "ppo": {"flow": "ppo", "algo": {"mini_batches": 2}, "critic": {"lr": 1e-2}},
    "dapo": {"flow": "dapo", "algo": {"rounds": 3}},
    "lora": {"train": {"lr": 1e-2, "lora": {"rank": 4}}, "algo": {}},
}
CURVES = ("actor/loss", "actor/grad_norm", "actor/lr", "reward/mean")
TP2 = {"roles": {r: {"tp": 2} for r in ("actor", "reference")}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("resume")
    (made / "data.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in PROMPTS))
    (made / "reward.py").write_text(REWARD)
    return made


def run(folder: Path, name: str, workers: int, resume: str | None = None, **changes: Any) -> tuple[Path, Ended]:
    path, run_dir = folder / f"{name}.yaml", folder / name
    path.write_text(yaml.safe_dump(CONFIG | {"run_dir": str(run_dir)} | changes))
    return run_dir, distflow_run(path, workers=workers, resume=resume)


def rows(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def cut(whole: Path, folder: Path, name: str, step: int) -> Path:
    """A run as it was left after `step`, with the log of one step more."""
    made = folder / name
    shutil.copytree(whole, made)
    for s in steps_there(made / "checkpoints"):
        if s > step:
            shutil.rmtree(made / "checkpoints" / f"step_{s}")
    (made / "checkpoints" / "latest").write_text(json.dumps({"step": step}))
    lines = (made / "metrics.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line)["step"] <= step]
    (made / "metrics.jsonl").write_text("".join(kept) + '{"step": 5, "cut sho')
    return made


@pytest.fixture(scope="module")
def whole(folder: Path) -> dict[str, Path]:
    """Undisturbed, on two workers."""
    found = {}
    for name, changes in FLOWS.items():
        found[name], ended = run(folder, name, 2, **changes)
        assert ended.codes == [0, 0], ended.err
    return found


def same(got: Path, want: Path, rel: float) -> None:
    ours, theirs = rows(got), rows(want)
    assert [r["step"] for r in ours] == [r["step"] for r in theirs] == list(range(-1, 8))
    for a, b in zip(ours[1:], theirs[1:], strict=True):
        for curve in (c for c in (*CURVES, "critic/loss", "sampling/discarded", "val/all/score") if c in b):
            assert a[curve] == (b[curve] if not rel else pytest.approx(b[curve], rel=rel, abs=1e-6)), (curve, b["step"])
    for role in ("actor", "critic"):
        place = want / "checkpoints" / "step_8" / role
        if place.is_dir():
            mine, other = load_whole(got / "checkpoints" / "step_8" / role), load_whole(place)
            assert mine.keys() == other.keys()
            for key in other:
                if rel:
                    assert torch.allclose(mine[key], other[key], rtol=rel, atol=1e-4), key
                else:
                    assert torch.equal(mine[key], other[key]), key


@pytest.mark.parametrize("flow", FLOWS)
def test_a_resumed_run_is_the_whole_run_to_the_bit(folder: Path, whole: dict[str, Path], flow: str) -> None:
    made = cut(whole[flow], folder, f"{flow}-again", 4)
    _, ended = run(folder, f"{flow}-again", 2, "newest", **FLOWS[flow])
    assert ended.codes == [0, 0], ended.err
    assert f"resumed from {made / 'checkpoints' / 'step_4'}" in ended.out
    same(made, whole[flow], 0)


def test_on_other_numbers_of_workers_it_is_the_same_curve(folder: Path, whole: dict[str, Path]) -> None:
    """A step or two each: on two workers, four, four in two halves each, two, one, and four again."""
    made = cut(whole["grpo"], folder, "others", 2)
    for workers, upto, placement in ((4, 3, {}), (4, 4, TP2), (2, 5, {}), (1, 6, {}), (4, 8, {})):
        # A shorter run would have another schedule of learning rates: it runs on, and what came later is forgotten.
        _, ended = run(folder, "others", workers, "newest", placement=placement, checkpoint={"every": 1, "keep": 9})
        assert ended.codes == [0] * workers, ended.err
        for s in steps_there(made / "checkpoints"):
            if s > upto:
                shutil.rmtree(made / "checkpoints" / f"step_{s}")
    same(made, whole["grpo"], 1e-3)


def test_a_damaged_checkpoint_is_told_and_an_older_one_taken(folder: Path, whole: dict[str, Path]) -> None:
    made = cut(whole["grpo"], folder, "damaged", 6)
    shard = next((made / "checkpoints" / "step_6" / "actor" / "tensors").iterdir())
    shard.write_bytes(shard.read_bytes()[:-10])
    (other := made / "checkpoints" / "step_4" / "state.json").write_text(other.read_text().replace("0", "1"))
    _, ended = run(folder, "damaged", 2, "newest")
    assert ended.codes == [0, 0], ended.err
    assert f"distflow: {shard} has" in ended.err
    assert "step_4/state.json is not what was written; looking for an older checkpoint" in ended.err
    assert "step_2" in ended.out
    same(made, whole["grpo"], 0)


def test_only_whole_checkpoints_count(folder: Path, whole: dict[str, Path]) -> None:
    made = cut(whole["grpo"], folder, "parts", 4)
    (made / "checkpoints" / "step_6.part").mkdir()
    (made / "checkpoints" / "step_8").mkdir()
    assert steps_there(made / "checkpoints") == [4, 2]
    (made / "checkpoints" / "step_8" / "complete.json").write_text("{")
    assert "its list of files cannot be read" in str(damage(made / "checkpoints" / "step_8"))


def test_what_cannot_be_resumed_is_told(folder: Path, whole: dict[str, Path]) -> None:
    _, ended = run(folder, "nothing", 1, "newest")
    assert ended.codes == [1]
    assert "--resume: of" in ended.err
    assert "there is none; start without --resume" in ended.err
    _, ended = run(folder, "other-seed", 1, str(whole["grpo"]), seed=3)
    assert ended.codes == [1]
    assert "is of a run with seed 0, the config has 3; set it back" in ended.err
    _, ended = run(folder, "fresh", 1, "1", steps=1, eval=None)  # after a restart: there may be none
    assert ended.codes == [0], ended.err


def test_a_run_told_to_end_keeps_its_last_step(folder: Path, whole: dict[str, Path]) -> None:
    """SIGTERM to one of two workers, as soon as a step is there."""
    run_dir = folder / "told"

    def tell() -> None:
        while not (run_dir / "metrics.jsonl").exists() or len(rows_so_far(run_dir)) < 2:
            time.sleep(0.01)
        os.kill(json.loads((run_dir / "workers" / "1.now").read_text())["pid"], signal.SIGTERM)

    teller = threading.Thread(target=tell)
    teller.start()
    _, ended = run(folder, "told", 2, checkpoint={"every": 0})
    teller.join()
    assert ended.codes == [143, 143], ended.err
    assert "stopped as told, after step" in ended.err
    kept = steps_there(run_dir / "checkpoints")
    assert len(kept) == 1
    assert len(rows_so_far(run_dir)) == kept[0] + 1
    _, ended = run(folder, "told", 2, "newest")
    assert ended.codes == [0, 0], ended.err
    same(run_dir, whole["grpo"], 0)


def rows_so_far(run_dir: Path) -> list[str]:
    return [line for line in (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True) if line.endswith("\n")]


def test_the_newest_and_the_best_are_kept(folder: Path) -> None:
    checkpoint = {"every": 1, "keep": 2, "best": "actor/entropy", "export": True}
    run_dir, ended = run(folder, "kept", 2, checkpoint=checkpoint, steps=5, eval=None)
    assert ended.codes == [0, 0], ended.err
    entropy = {r["step"] + 1: r["actor/entropy"] for r in rows(run_dir)}
    best = max(entropy, key=lambda s: entropy[s])
    there = steps_there(run_dir / "checkpoints")
    assert {5, 4, best} >= set(there) >= {5, 4}
    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM.from_pretrained(run_dir / "checkpoints" / "step_5" / "huggingface")
