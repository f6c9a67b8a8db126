"""A run whose rollouts are some steps ahead is as reproducible as one in lock-step, also when it is interrupted."""

import json
import os
import shutil
import signal
import threading
import time
from functools import partial
from pathlib import Path
from string import ascii_letters
from typing import Any

import pytest
import torch
import yaml

from distflow.checkpoint.store import list_checkpoints, load_full_tensors
from distflow.run_folder import LATEST
from generating_weights import Sample, largest_difference
from warm import Ended, cli_main, distflow_run

STEPS, BATCH, ROWS = 8, 4, 10  # an epoch ends in the middle of a step
FLOW = """
import json

from distflow import flow, node
from distflow.flows.grpo import grpo

SAMPLED = "prompt_tokens", "response_tokens", "rollout_logprobs"


@node(writes="trained_id")
def note(batch, ctx):
    with open(ctx.folder / "trained" / f"{ctx.rank}.jsonl", "a") as file:
        rows = zip(batch.ids.tolist(), batch["row"], batch["response_tokens"], strict=True)
        file.writelines(json.dumps([ctx.step, i, row, tokens.tolist()]) + "\\n" for i, row, tokens in rows)
    with open(ctx.folder / "sampled.jsonl", "a") as file:
        columns = [[x.tolist() for x in batch[field]] for field in SAMPLED]
        rows = zip(batch["weight_version"].tolist(), *columns, strict=True)
        file.writelines(json.dumps(row) + "\\n" for row in rows)
    return batch.ids.copy()


class Noted:
    def __init__(self, actor, prompts):
        self.logprobs, self._generate, self._update = actor.logprobs, actor.generate, actor.update
        self.prompts = prompts

    def generate(self, prompts):
        self.rollout = self._generate(prompts)
        return self.rollout

    def update(self, tokens, *fields, **constants):
        note(self.prompts["row"], *(self.rollout[field] for field in (*SAMPLED, "weight_version")))
        self._update(tokens, *fields, **constants)


@flow
def noted(prompts, actor, reference, reward, *, rollout_correction=None):
    grpo.fn(prompts, Noted(actor, prompts), reference, reward, rollout_correction=rollout_correction)
"""
REWARD = """
def any_digit(solution_str):
    return float(any(c in "1234" for c in solution_str))
"""
CONFIG: dict[str, Any] = {
    "flow": "flow.py:noted",
    "data": {"files": "data.jsonl", "batch": BATCH},
    "steps": STEPS,
    "model": {"arch": "qwen2", "hidden": 32, "layers": 1, "heads": 4, "kv_heads": 2},
    "rollout": {"n": 2, "max_tokens": 8, "staleness": 2},
    "train": {"lr": 1e-2},
    "reward": "reward.py:any_digit",
    "eval": {"files": "data.jsonl", "every": 3, "limit": 4},
    "checkpoint": {"every": 2, "keep": 10},
    "wait_limit_s": 60,
}
CURVES = ("actor/loss", "actor/grad_norm", "reward/mean", "response_length/mean", "rollout/staleness", "val/all/score")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("staleness")
    rows = [{"prompt": f"{'so ' * (i % 3)}what is {i} + {i * i % 17}?", "row": i} for i in range(ROWS)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "flow.py").write_text(FLOW)
    (folder / "reward.py").write_text(REWARD)
    return folder


def run(
    folder: Path, name: str, rollout: int = 2, train: int = 1, resume: str | None = None, main: Any = None, **rest: Any
) -> tuple[Path, list[int]]:
    """Returns the run's folder and the exit codes, which are 0 unless there is another `main`."""
    ended = run_to_end(folder, name, rollout, train, resume, main, **rest)
    assert main or ended.codes == [0] * len(ended.codes), ended.err
    return folder / name, ended.codes


def run_to_end(
    folder: Path, name: str, rollout: int = 2, train: int = 1, resume: str | None = None, main: Any = None, **rest: Any
) -> Ended:
    """Trains on `train` workers and generates on as many others."""
    path, run_dir = folder / f"{name}.yaml", folder / name
    (run_dir / "trained").mkdir(parents=True, exist_ok=True)
    placement = {
        "ranks": {"rollout": f"0-{rollout - 1}", "train": f"{rollout}-{rollout + train - 1}"},
        "default": {"ranks": "train"},
        "nodes": {"actor.generate": {"ranks": "rollout"}},
    }
    changes = {"run_dir": str(run_dir), "placement": placement, "rollout": CONFIG["rollout"] | rest}
    path.write_text(yaml.safe_dump(CONFIG | changes))
    return distflow_run(path, workers=rollout + train, resume=resume, main=main)


def rows(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def trained(run_dir: Path) -> dict[tuple[int, int], tuple[int, list[int]]]:
    """(step, sample id) → row and tokens, of what was trained; if a step was done again, as it was done last."""
    lines = [json.loads(x) for f in (run_dir / "trained").iterdir() for x in f.read_text().splitlines()]
    return {(step, sample): (row, tokens) for step, sample, row, tokens in lines}


def check_same(got: Path, want: Path, rel: float) -> None:
    ours, theirs = rows(got), rows(want)
    assert [r["step"] for r in ours] == [r["step"] for r in theirs] == list(range(STEPS + 1))
    for a, b in zip(ours[1:], theirs[1:], strict=True):
        for curve in (c for c in CURVES if c in b):
            assert a[curve] == (b[curve] if not rel else pytest.approx(b[curve], rel=rel, abs=1e-6)), (curve, b["step"])
    mine, other = (load_full_tensors(run_dir / "checkpoints" / f"step_{STEPS}" / "actor") for run_dir in (got, want))
    for key in other:
        assert torch.allclose(mine[key], other[key], rtol=rel, atol=1e-4) if rel else torch.equal(mine[key], other[key])


@pytest.fixture(scope="module")
def complete(folder: Path) -> Path:
    return run(folder, "complete")[0]


def cut(complete: Path, folder: Path, name: str, step: int) -> None:
    """Copies a run as it was after `step`."""
    shutil.copytree(complete, folder / name)
    for s in list_checkpoints(folder / name / "checkpoints"):
        if s > step:
            shutil.rmtree(folder / name / "checkpoints" / f"step_{s}")


def test_a_stale_run_repeats_itself_to_the_bit(folder: Path, complete: Path) -> None:
    again, _ = run(folder, "again")
    check_same(again, complete, 0)
    assert trained(again) == trained(complete)
    assert [r["rollout/staleness"] for r in rows(again)[1:]] == [0, 1, *[2] * (STEPS - 2)]


def test_the_number_of_workers_that_generate_does_not_matter(folder: Path, complete: Path) -> None:
    other, _ = run(folder, "one-rollout-worker", rollout=1)
    check_same(other, complete, 1e-3)
    assert trained(other) == trained(complete)


def test_chunks_change_nothing_but_when_others_start(folder: Path, complete: Path) -> None:
    chunks, _ = run(folder, "chunks", chunk=2)
    check_same(chunks, complete, 1e-3)
    assert trained(chunks) == trained(complete)


def test_a_resumed_run_is_the_uninterrupted_run_to_the_bit(folder: Path, complete: Path) -> None:
    for name, rollout, rel in (("resumed", 2, 0.0), ("on-fewer", 1, 1e-3)):
        cut(complete, folder, name, 4)
        shutil.rmtree(folder / name / "trained")
        resumed, _ = run(folder, name, rollout, resume="newest")
        check_same(resumed, complete, rel)
        # Nothing was generated or trained twice: the rollouts that were ahead came from the checkpoint.
        assert trained(resumed) == {k: v for k, v in trained(complete).items() if k[0] > 4}


@pytest.mark.parametrize("staleness", [1, 0])
def test_another_staleness_says_which_rollouts_are_made_again(folder: Path, complete: Path, staleness: int) -> None:
    name = f"staleness-{staleness}"
    cut(complete, folder, name, 4)
    shutil.rmtree(folder / name / "trained")
    ended = run_to_end(folder, name, resume="newest", staleness=staleness)
    assert ended.codes == [0, 0, 0], ended.err
    assert [r["step"] for r in rows(folder / name)] == list(range(STEPS + 1))
    per_step = 2 * BATCH
    assert (
        f"distflow: --resume: {folder / name / 'checkpoints' / 'step_4'}: it was written with rollout.staleness 2, the"
        f" config has {staleness}; rollouts of steps 5-6 are dropped, and samples {4 * per_step}-{6 * per_step - 1} are"
        " generated again; set it back to use them\n"
    ) in ended.err
    resumed = trained(folder / name)
    assert sorted(resumed) == [(1 + i // per_step, i) for i in range(4 * per_step, STEPS * per_step)]
    assert {k: row for k, (row, _) in resumed.items()} == {
        k: row for k, (row, _) in trained(complete).items() if k[0] > 4
    }


def test_log_probs_are_the_trainer_s_by_the_weights_that_generated(folder: Path, complete: Path) -> None:
    """To the bit, also of what was generated before an interruption, and trained after it."""
    cut(complete, folder, "exact", 4)
    (folder / "exact" / "sampled.jsonl").unlink()
    run_dir, _ = run(folder, "exact", resume="newest")
    for done, steps in ((complete, range(1, STEPS + 1)), (run_dir, range(5, STEPS + 1))):
        by_version: dict[int, list[Sample]] = {}
        for line in (done / "sampled.jsonl").read_text().splitlines():
            version, prompt, tokens, logprobs = json.loads(line)
            by_version.setdefault(version, []).append((prompt, tokens, logprobs))
        assert sorted(by_version) == sorted({max(0, step - 3) for step in steps})
        for version in (2, 4):  # that have checkpoints
            assert largest_difference(done, version, by_version[version]) == 0
        assert largest_difference(done, 2, by_version[4]) > 0  # other weights have others


def test_every_sample_is_trained_once_across_epochs(complete: Path) -> None:
    assert sorted(sample for _, sample in trained(complete)) == list(range(STEPS * BATCH * 2))
    first_epoch = [row for (_, sample), (row, _) in trained(complete).items() if sample < 2 * ROWS]
    assert sorted(first_epoch) == sorted(2 * list(range(ROWS)))


def interrupted(words: list[str], sign: signal.Signals) -> None:
    """Runs a worker; rank 1 gets a signal as soon as three steps are logged and there is a checkpoint."""
    run_dir, pid = Path(words[1]).with_suffix(""), os.getpid()

    def interrupt() -> None:
        log, pointer = run_dir / "metrics.jsonl", run_dir / "checkpoints" / LATEST  # written in the background
        while not log.exists() or log.read_text().count("\n") < 4 or not pointer.exists():
            time.sleep(0.005)
        os.kill(pid, sign)

    if os.environ["RANK"] == "1":
        threading.Thread(target=interrupt, daemon=True).start()
    cli_main(words)


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_run_continues_where_it_was(folder: Path, complete: Path, sign: signal.Signals) -> None:
    name = sign.name
    run(folder, name, main=partial(interrupted, sign=sign))  # on a busy machine it may end before
    run_dir, codes = run(folder, name, resume="newest")
    assert codes == [0, 0, 0]
    check_same(run_dir, complete, 0)
    assert trained(run_dir) == trained(complete)


# Responses end at different times, and there are fewer slots than samples: some of the next step begin early.
PARTIAL: dict[str, Any] = {
    "chunk": 2,
    "partial": True,
    "stop": list(ascii_letters),
    "max_tokens": 24,
    "max_sequences": 3,
}


@pytest.fixture(scope="module")
def partial_rollouts(folder: Path) -> Path:
    return run(folder, "partial", **PARTIAL)[0]


def loaded(run_dir: Path) -> list[tuple[int, int]]:
    """Returns (epoch, row) of everything that was trained, sorted."""
    return sorted((sample // (2 * ROWS), row) for (_, sample), (row, _) in trained(run_dir).items())


def test_with_chunks_partial_rollouts_and_a_kill_every_sample_is_trained_once(
    folder: Path, partial_rollouts: Path
) -> None:
    run(folder, "partial-killed", main=partial(interrupted, sign=signal.SIGKILL), **PARTIAL)
    run_dir, _ = run(folder, "partial-killed", resume="newest", **PARTIAL)
    check_same(run_dir, partial_rollouts, 0)
    assert trained(run_dir) == trained(partial_rollouts)
    for done in (run_dir, partial_rollouts):
        assert sorted(trained(done)) == [(1 + i // (2 * BATCH), i) for i in range(STEPS * BATCH * 2)]
        positions = [i // 2 for i in range(STEPS * BATCH * 2)]
        assert [epoch for epoch, _ in loaded(done)] == [p // ROWS for p in positions]
        assert [x for x in loaded(done) if x[0] == 0] == [(0, row) for row in range(ROWS) for _ in range(2)]
    curve = [r["rollout/carried_frac"] for r in rows(partial_rollouts)[1:]]
    assert curve[0] == 0
    assert min(curve[1:]) > 0
    staleness = [r["rollout/staleness"] for r in rows(partial_rollouts)[1:]]
    assert all(2 < s <= 3 for s in staleness[3:])  # some samples have tokens of the weights of a step before


def test_what_was_begun_early_survives_a_resume(folder: Path, partial_rollouts: Path) -> None:
    cut(partial_rollouts, folder, "partial-resumed", 4)
    shutil.rmtree(folder / "partial-resumed" / "trained")
    resumed, _ = run(folder, "partial-resumed", resume="newest", **PARTIAL)
    check_same(resumed, partial_rollouts, 0)
    assert trained(resumed) == {k: v for k, v in trained(partial_rollouts).items() if k[0] > 4}


def test_responses_that_are_no_longer_carried_on_are_named(folder: Path, partial_rollouts: Path) -> None:
    cut(partial_rollouts, folder, "partial-no-more", 4)
    shutil.rmtree(folder / "partial-no-more" / "trained")
    ended = run_to_end(folder, "partial-no-more", resume="newest", **PARTIAL | {"partial": False})
    assert ended.codes == [0, 0, 0], ended.err
    assert "step_4: it was written with rollout.partial, which the config has not; rollouts of steps 6 are" in ended.err
    want = [key for key in sorted(trained(partial_rollouts)) if key[0] > 4]
    assert sorted(trained(folder / "partial-no-more")) == want


@pytest.mark.slow
def test_also_on_another_number_of_workers_every_sample_is_trained_once(folder: Path, partial_rollouts: Path) -> None:
    cut(partial_rollouts, folder, "partial-on-fewer", 4)
    fewer, _ = run(folder, "partial-on-fewer", rollout=1, resume="newest", **PARTIAL)
    assert sorted(trained(fewer)) == sorted(trained(partial_rollouts))
    assert loaded(fewer) == loaded(partial_rollouts)


def d1(folder: Path, name: str) -> Path:
    return run(folder, name, staleness=1)[0]


@pytest.mark.slow
def test_with_a_staleness_of_one_too(folder: Path) -> None:
    check_same(d1(folder, "one"), d1(folder, "one-again"), 0)
    check_same(run(folder, "one-worker", rollout=1, staleness=1)[0], folder / "one", 1e-3)
