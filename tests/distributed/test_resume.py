"""A run that was interrupted and resumed is the run that was not: the same curve and weights, whatever the workers."""

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

from distflow.checkpoint.export import export
from distflow.checkpoint.store import FORMAT, file_list, list_checkpoints, load_full_tensors, sha256, verify
from distflow.errors import ConfigError
from distflow.run_folder import BEST
from warm import Ended, cli_main, distflow_run

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
    "dapo": {"flow": "dapo", "algo": {"max_gen_batches": 3}},
    "lora": {"train": {"lr": 1e-2, "lora": {"rank": 4}}, "algo": {}},
}
CURVES = ("actor/loss", "actor/grad_norm", "actor/lr", "reward/mean")
TP2 = {"roles": {r: {"tp": 2} for r in ("actor", "reference")}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resume")
    (folder / "data.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in PROMPTS))
    (folder / "reward.py").write_text(REWARD)
    return folder


def run(
    folder: Path, name: str, workers: int, resume: str | None = None, main: Any = None, **changes: Any
) -> tuple[Path, Ended]:
    path, run_dir = folder / f"{name}.yaml", folder / name
    path.write_text(yaml.safe_dump(CONFIG | {"run_dir": str(run_dir)} | changes))
    return run_dir, distflow_run(path, workers=workers, resume=resume, main=main)


def rows(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def cut(complete: Path, folder: Path, name: str, step: int) -> Path:
    """Copies a run as it was after `step`, with the log of one step more."""
    run_dir = folder / name
    shutil.copytree(complete, run_dir)
    for s in list_checkpoints(run_dir / "checkpoints"):
        if s > step:
            shutil.rmtree(run_dir / "checkpoints" / f"step_{s}")
    (run_dir / "checkpoints" / "latest").write_text(json.dumps({"step": step}))
    lines = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line)["step"] <= step]
    (run_dir / "metrics.jsonl").write_text("".join(kept) + '{"step": 5, "cut sho')
    return run_dir


@pytest.fixture(scope="module")
def complete(folder: Path) -> dict[str, Path]:
    """Uninterrupted runs on two workers."""
    runs = {}
    for name, changes in FLOWS.items():
        runs[name], ended = run(folder, name, 2, **changes)
        assert ended.codes == [0, 0], ended.err
    return runs


def same(got: Path, want: Path, rel: float) -> None:
    ours, theirs = rows(got), rows(want)
    assert [r["step"] for r in ours] == [r["step"] for r in theirs] == list(range(9))
    for a, b in zip(ours[1:], theirs[1:], strict=True):
        for curve in (c for c in (*CURVES, "critic/loss", "sampling/discarded", "val/all/score") if c in b):
            assert a[curve] == (b[curve] if not rel else pytest.approx(b[curve], rel=rel, abs=1e-6)), (curve, b["step"])
    for role in ("actor", "critic"):
        path = want / "checkpoints" / "step_8" / role
        if path.is_dir():
            mine, other = load_full_tensors(got / "checkpoints" / "step_8" / role), load_full_tensors(path)
            assert mine.keys() == other.keys()
            for key in other:
                if rel:
                    assert torch.allclose(mine[key], other[key], rtol=rel, atol=1e-4), key
                else:
                    assert torch.equal(mine[key], other[key]), key


@pytest.mark.parametrize("flow", FLOWS)
def test_a_resumed_run_is_the_uninterrupted_run_to_the_bit(folder: Path, complete: dict[str, Path], flow: str) -> None:
    run_dir = cut(complete[flow], folder, f"{flow}-again", 4)
    _, ended = run(folder, f"{flow}-again", 2, "newest", **FLOWS[flow])
    assert ended.codes == [0, 0], ended.err
    assert f"distflow: resumed from {run_dir / 'checkpoints' / 'step_4'}\n" in ended.err
    same(run_dir, complete[flow], 0)


def test_the_curve_is_the_same_on_another_number_of_workers(folder: Path, complete: dict[str, Path]) -> None:
    """A step or two each: on two workers, two times two replicas, four with tensor parallelism, two that divide
    sequences, one, and four."""
    run_dir = cut(complete["grpo"], folder, "others", 2)
    layouts: list[tuple[int, int, dict[str, Any]]] = [
        (4, 3, {"train": CONFIG["train"] | {"shard_degree": 2}}),
        (4, 4, {"placement": TP2}),
        (2, 5, {"placement": {"default": {"sp": 2}}}),
        (1, 6, {}),
        (4, 8, {}),
    ]
    for workers, upto, changes in layouts:
        # A shorter run would have another learning rate schedule: it runs to its end, and what came later is removed.
        _, ended = run(folder, "others", workers, "newest", **changes, checkpoint={"every": 1, "keep": 9})
        assert ended.codes == [0] * workers, ended.err
        for s in list_checkpoints(run_dir / "checkpoints"):
            if s > upto:
                shutil.rmtree(run_dir / "checkpoints" / f"step_{s}")
    same(run_dir, complete["grpo"], 1e-3)


def test_a_damaged_checkpoint_is_reported_and_an_older_one_used(folder: Path, complete: dict[str, Path]) -> None:
    run_dir = cut(complete["grpo"], folder, "damaged", 6)
    shard = next((run_dir / "checkpoints" / "step_6" / "actor" / "tensors").iterdir())
    shard.write_bytes(shard.read_bytes()[:-10])
    (other := run_dir / "checkpoints" / "step_4" / "state.json").write_text(other.read_text().replace("0", "1"))
    _, ended = run(folder, "damaged", 2, "newest")
    assert ended.codes == [0, 0], ended.err
    assert f"distflow: {shard} has" in ended.err
    assert "step_4/state.json has changed since it was written; looking for an older checkpoint" in ended.err
    assert "step_2\n" in ended.err
    same(run_dir, complete["grpo"], 0)


def test_only_complete_checkpoints_count(folder: Path, complete: dict[str, Path]) -> None:
    run_dir = cut(complete["grpo"], folder, "parts", 4)
    (run_dir / "checkpoints" / "step_6.part").mkdir()
    (run_dir / "checkpoints" / "step_8").mkdir()
    assert list_checkpoints(run_dir / "checkpoints") == [4, 2]
    (run_dir / "checkpoints" / "step_8" / "complete.json").write_text("{")
    assert "its list of files cannot be read" in str(verify(run_dir / "checkpoints" / "step_8"))


def test_a_run_that_cannot_be_resumed_says_why(folder: Path, complete: dict[str, Path]) -> None:
    _, ended = run(folder, "nothing", 1, "newest")
    assert ended.codes == [1]
    assert "--resume: there is no checkpoint in" in ended.err
    assert "start without --resume" in ended.err
    _, ended = run(folder, "other-seed", 1, str(complete["grpo"]), seed=3)
    assert ended.codes == [1]
    assert "is of a run with seed 0, the config has 3; set it back" in ended.err
    _, ended = run(folder, "other-order", 1, str(complete["grpo"]), data=CONFIG["data"] | {"shuffle": False})
    assert "is of a run with shuffle True, the config has False; set it back" in ended.err
    _, ended = run(folder, "fresh", 1, "auto", steps=1, eval=None)  # as after a restart by torchrun
    assert ended.codes == [0], ended.err


@pytest.mark.parametrize("number", [None, FORMAT + 1])
def test_a_checkpoint_of_another_format_is_refused(folder: Path, complete: dict[str, Path], number: int | None) -> None:
    """By --resume and by export; a restart never uses it, but starts from the beginning."""
    run_dir = cut(complete["grpo"], folder, f"format-{number}", 2)
    path = run_dir / "checkpoints" / "step_2"
    contents = json.loads((path / "complete.json").read_text())
    del contents["format"]
    (path / "complete.json").write_text(json.dumps(contents | ({"format": number} if number else {})))
    for source in ("newest", str(run_dir), str(path)):
        _, ended = run(folder, run_dir.name, 1, source)
        assert ended.codes == [1]
        assert ended.err.count("--resume: ") == 1
        assert f"--resume: {path} was written by another version of DistFlow" in ended.err
        assert "start anew from the export (model: DIRECTORY), or use another run_dir" in ended.err
    with pytest.raises(ConfigError, match=f"^{path} was written by another version of DistFlow"):
        export(run_dir, folder / "out")
    _, ended = run(folder, run_dir.name, 1, "auto", steps=1, eval=None)
    assert ended.codes == [0], ended.err
    assert "resumed" not in ended.err
    assert list_checkpoints(run_dir / "checkpoints") == [1]
    assert list_checkpoints(run_dir / "earlier/1/checkpoints") == [2]
    assert f"the earlier run in {run_dir} is kept in {run_dir}/earlier/1; to continue a run, use --resume" in ended.err


def write_rows(folder: Path, prompts: list[str]) -> None:
    (folder / "known.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))


def without(run_dir: Path, step: int, *keys: str) -> None:
    """Writes the state of a checkpoint as versions did that knew nothing of some keys."""
    path = run_dir / "checkpoints" / f"step_{step}"
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps({k: v for k, v in state.items() if k not in keys}))
    files = json.loads((path / "complete.json").read_text())["files"]
    files["state.json"] = ((path / "state.json").stat().st_size, sha256(path / "state.json"))
    (path / "complete.json").write_text(file_list(step, files))


def with_three_threads(words: list[str]) -> None:
    os.environ["OMP_NUM_THREADS"] = "3"
    torch.set_num_threads(3)
    cli_main(words)


def test_a_resumed_run_knows_its_data_and_its_threads(folder: Path) -> None:
    """Rows that changed are refused, on all workers; rows that were appended join with the next epoch."""
    changes: dict[str, Any] = {"data": {"files": "known.jsonl", "batch": 4}, "eval": None, "steps": 5}
    write_rows(folder, PROMPTS)
    complete, ended = run(folder, "knows", 2, **changes)
    assert ended.codes == [0, 0], ended.err
    [host] = json.loads((complete / "run.json").read_text())["hosts"]
    threads = host["threads"]
    assert threads != "3"

    run_dir = cut(complete, folder, "knows-again", 2)
    write_rows(folder, PROMPTS[1:])
    _, ended = run(folder, "knows-again", 2, "newest", **changes)
    assert ended.codes == [1, 1]
    assert (
        f"--resume: {folder / 'known.jsonl'} has 19 rows, of 20 when the checkpoint was written; some rows" in ended.err
    )
    assert "put the rows back in their places (new ones may follow the last), or start anew from an export" in ended.err
    write_rows(folder, [PROMPTS[1], PROMPTS[0], *PROMPTS[2:]])
    _, ended = run(folder, "knows-again", 1, "newest", **changes)
    assert ended.codes == [1]
    assert f"the first 20 rows of {folder / 'known.jsonl'} have changed since the checkpoint was written" in ended.err

    write_rows(folder, [*PROMPTS, "one more", "and another"])
    _, ended = run(folder, "knows-again", 1, "newest", main=with_three_threads, **changes | {"steps": 6})
    assert ended.codes == [0], ended.err
    assert "the data has 22 rows now; the new ones join with the next epoch, at prompt 20" in ended.err
    assert f"workers with {threads} threads each, these have 3: results may differ" in ended.err
    state = json.loads((run_dir / "checkpoints" / "step_6" / "state.json").read_text())
    assert state["data"]["eras"] == [[0, 20], [20, 22]]

    shutil.rmtree(run_dir)
    run_dir = cut(complete, folder, "knows-again", 2)
    without(run_dir, 2, "data", "threads")
    _, ended = run(folder, "knows-again", 1, "newest", **changes | {"steps": 3})
    assert ended.codes == [0], ended.err
    assert "step_2 does not say which data it was trained on; that it is the same is not checked" in ended.err


def terminated(words: list[str]) -> None:
    """Runs a worker; rank 1 gets SIGTERM as soon as a step is done."""
    run_dir, pid = Path(words[1]).with_suffix(""), os.getpid()

    def terminate() -> None:
        while not (run_dir / "metrics.jsonl").exists() or len(rows_so_far(run_dir)) < 2:
            time.sleep(0.01)
        os.kill(pid, signal.SIGTERM)

    if os.environ["RANK"] == "1":
        threading.Thread(target=terminate, daemon=True).start()
    cli_main(words)


def test_a_run_that_is_asked_to_end_saves_its_last_step(folder: Path, complete: dict[str, Path]) -> None:
    """SIGTERM to one of two workers."""
    run_dir, ended = run(folder, "stopped", 2, main=terminated, checkpoint={"every": 0})
    assert ended.codes == [143, 143], ended.err
    assert "stopped on request after step" in ended.err
    saved = list_checkpoints(run_dir / "checkpoints")
    assert len(saved) == 1
    assert len(rows_so_far(run_dir)) == saved[0] + 1
    _, ended = run(folder, "stopped", 2, "newest")
    assert ended.codes == [0, 0], ended.err
    same(run_dir, complete["grpo"], 0)


def terminated_while_it_evaluates(words: list[str]) -> None:
    """Runs a worker; rank 1 gets SIGTERM in the evaluation before the first step."""
    from distflow.run.evaluation import Evaluation

    evaluate = Evaluation.__call__

    def terminated_first(self: Evaluation, step: int, metrics: Any) -> Any:
        if step == 0 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(self, step, metrics)

    Evaluation.__call__ = terminated_first  # type: ignore[method-assign]
    cli_main(words)


def test_a_run_that_is_asked_to_end_before_its_first_step_saves_that_one(folder: Path) -> None:
    run_dir, ended = run(folder, "stopped-early", 2, main=terminated_while_it_evaluates, checkpoint={"every": 0})
    assert ended.codes == [143, 143], ended.err
    assert list_checkpoints(run_dir / "checkpoints") == [1]


def rows_so_far(run_dir: Path) -> list[str]:
    return [line for line in (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True) if line.endswith("\n")]


BEST_IS_THE_SECOND = """
def peak(completions, trainer_state, **rest):
    return [[0.0, 0.25, 1.0, 0.5, 0.75, 0.125, 0.25][trainer_state.global_step + 1]] * len(completions)
"""


def test_the_newest_and_the_best_are_kept(folder: Path) -> None:
    (folder / "peak.py").write_text(BEST_IS_THE_SECOND)
    checkpoint = {"every": 1, "keep": 2, "best": "reward/mean", "export": True}
    changes: dict[str, Any] = {"checkpoint": checkpoint, "steps": 5, "eval": None, "reward": "peak.py:peak"}
    run_dir, ended = run(folder, "kept", 2, **changes)
    assert ended.codes == [0, 0], ended.err
    assert [r["reward/mean"] for r in rows(run_dir)] == [0.25, 1.0, 0.5, 0.75, 0.125]
    assert list_checkpoints(run_dir / "checkpoints") == [5, 4, 2]
    assert json.loads((run_dir / "checkpoints" / BEST).read_text()) == {"step": 2}
    from transformers import AutoModelForCausalLM

    path = run_dir / "checkpoints" / "step_5"
    assert AutoModelForCausalLM.from_pretrained(path / "huggingface")
    check_listed(path)
    weights = path / "huggingface" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    assert verify(path) == f"{weights} has changed since it was written"
    (run_dir / "metrics.jsonl").unlink()  # the best one is known without it
    _, ended = run(folder, "kept", 2, "newest", **changes | {"steps": 6})
    assert ended.codes == [0, 0], ended.err
    assert list_checkpoints(run_dir / "checkpoints") == [6, 5, 2]
    assert f"distflow: resumed from {path}\n" in ended.err  # the state is sound
    text = f"{weights} has changed since it was written; the run does not need it, `distflow export` writes another\n"
    assert ended.err.count(text) == 1


def check_listed(path: Path) -> None:
    files = {str(p.relative_to(path)) for p in path.rglob("*") if p.is_file()}
    assert files == {*json.loads((path / "complete.json").read_text())["files"], "complete.json"}


def test_every_file_of_a_checkpoint_is_listed(folder: Path) -> None:
    changes = FLOWS["lora"] | {"steps": 1, "eval": None, "checkpoint": {"export": True}}
    run_dir, ended = run(folder, "listed", 2, **changes)
    assert ended.codes == [0, 0], ended.err
    path = run_dir / "checkpoints" / "step_1"
    assert (path / "huggingface" / "config.json").exists()
    assert (path / "actor" / "adapter" / "adapter_config.json").exists()
    check_listed(path)
