"""Models beside the one that is trained: a teacher, another reference, a moving average of the actor."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from distflow.checkpoint.export import export
from distflow.checkpoint.store import load_full_tensors
from distflow.config.schema import ModelConfig
from distflow.model.source import open_model
from warm import Ended, distflow_run

PROMPTS = [f"count from {i}" for i in range(8)]
FLOWS = '''
import torch
from distflow import Batch, Context, flow, node


@node(writes="advantage")
def likes_a(batch: Batch, ctx: Context):
    return torch.tensor([float(r.count("a") + r.count("e")) - 1 for r in batch["response"]])


@node(writes=())
def compare(batch: Batch, ctx: Context):
    ema = batch["ema_logprobs"].joined()
    for name in ("old", "ref"):
        other = batch[f"{name}_logprobs"].joined()
        if len(other):
            ctx.metrics.log(f"ema/{name}", float((ema - other).abs().max()), reduce="max")


class Average:
    """A user's role that averages a vector over the steps."""

    def __init__(self):
        self.vector = torch.zeros(3)

    @node(writes=())
    def update(self, batch: Batch, ctx: Context):
        self.vector = 0.9 * self.vector + 0.1 * ctx.step * torch.arange(3.0)
        ctx.metrics.log("average", float(self.vector[2]))

    def state(self):
        return {"vector": self.vector, "dtype": str(self.vector.dtype)}

    def restore(self, state):
        assert state["dtype"] == str(state["vector"].dtype)
        self.vector = state["vector"]


@flow
def averaged(prompts, actor, reference, average):
    rollout = actor.generate(prompts["prompt"])
    tokens = rollout["prompt_tokens", "response_tokens"]
    compare(actor.ema_logprobs(tokens), actor.logprobs(tokens), reference.logprobs(tokens))
    average.update(prompts["prompt"])
    actor.update(tokens, rollout["rollout_logprobs"], likes_a(rollout["response"]), loss="policy")
'''
CONFIG: dict[str, Any] = {
    "data": {"files": "data.jsonl", "batch": 8},
    "model": "student",
    "rollout": {"n": 2, "max_tokens": 8},
    "checkpoint": {"every": 2, "keep": 10},
    "wait_limit_s": 60,
}
AVERAGED: dict[str, Any] = {
    "flow": "flows.py:averaged",
    "steps": 4,
    "roles": {"average": "flows.py:Average"},
    "train": {"lr": 1e-2, "ema": 0.5},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    (folder / "data.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in PROMPTS))
    (folder / "flows.py").write_text(FLOWS)
    source = open_model(
        ModelConfig(arch="qwen2", hidden=32, layers=2, heads=4, kv_heads=2), lambda: iter(()), folder, 0
    )
    AutoModelForCausalLM.from_config(source.config).save_pretrained(folder / "student")
    source.tokenizer.save_pretrained(folder / "student")
    letters = random.Random(0)
    words = ("".join(letters.choices("abcdefghijklmnop", k=12)) for _ in range(64))
    lines = (json.dumps({"prompt": PROMPTS[i % 8], "response": word}) + "\n" for i, word in enumerate(words))
    (folder / "words.jsonl").write_text("".join(lines))
    ended = run(folder, "sft", 1, flow="sft", data={"files": "words.jsonl", "batch": 32}, steps=20, train={"lr": 1e-2})
    assert ended.codes == [0], ended.err
    export(folder / "sft", folder / "teacher")
    return folder


def run(folder: Path, name: str, workers: int, resume: str | None = None, **changes: Any) -> Ended:
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(CONFIG | {"run_dir": str(folder / name)} | changes))
    return distflow_run(path, workers=workers, resume=resume)


def rows(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


DISTILLED: dict[str, Any] = {
    "rollout": {"n": 8, "max_tokens": 8},
    "roles": {"teacher": {"model": "teacher"}},
    "train": {"lr": 1e-2},
}


def test_a_student_learns_from_a_teacher(folder: Path) -> None:
    """By its log-probs as a reward; on two workers, where the teacher is sharded like any model."""
    ended = run(folder, "distilled", 2, **DISTILLED | {"flow": "distill", "steps": 20})
    assert ended.codes == [0, 0], ended.err
    divergence = [row["distill/reverse_kl"] for row in rows(folder / "distilled")]
    assert divergence[0] > 1
    assert divergence[-1] < divergence[0] / 2, divergence


@pytest.fixture(scope="module")
def by_divergence(folder: Path) -> list[dict[str, float]]:
    changes: dict[str, Any] = {"flow": "gkd", "steps": 8, "algo": {"k": 16, "divergence": "forward"}}
    ended = run(folder, "gkd", 1, **DISTILLED | changes)
    assert ended.codes == [0], ended.err
    return rows(folder / "gkd")


def test_it_learns_faster_by_the_divergence_at_every_token(by_divergence: list[dict[str, float]]) -> None:
    divergence = [row["distill/divergence"] for row in by_divergence]
    assert divergence[0] > 1
    assert divergence[-1] < divergence[0] / 2, divergence


@pytest.mark.parametrize("micro_tokens", [16384, 64])
def test_the_likeliest_tokens_arrive_in_any_layout(
    folder: Path, by_divergence: list[dict[str, float]], micro_tokens: int
) -> None:
    """On two workers, of which one is the teacher's; in any micro-batches."""
    changes: dict[str, Any] = {
        "flow": "gkd",
        "steps": 3,
        "algo": {"k": 16, "divergence": "forward"},
        "train": {"lr": 1e-2, "micro_tokens": micro_tokens},
        "placement": {"ranks": {"other": "1"}, "roles": {"teacher": {"ranks": "other"}}},
    }
    name = f"gkd{micro_tokens}"
    ended = run(folder, name, 2, **DISTILLED | changes)
    assert ended.codes == [0, 0], ended.err
    for ours, theirs in zip(rows(folder / name), by_divergence[:3], strict=True):
        for key in ("distill/divergence", "actor/loss", "actor/grad_norm"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-3), key


def test_each_data_source_has_its_teacher(folder: Path) -> None:
    """Of two teachers, one is the student itself: its samples have no divergence."""
    mixed = ({"prompt": p, "data_source": ["same", "other"][i % 2]} for i, p in enumerate(PROMPTS))
    (folder / "mixed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in mixed))
    first = {}
    for name, models in (
        ("two", {"same": "student", "other": "teacher"}),
        ("one", {"same": "teacher", "other": "teacher"}),
    ):
        teacher = {"call": "teachers", "args": {"models": models}}
        ended = run(
            folder,
            f"teachers-{name}",
            2,
            **DISTILLED | {"flow": "gkd", "algo": {"k": 300}, "steps": 1, "roles": {"teacher": teacher}},
            data={"files": "mixed.jsonl", "batch": 8},
        )
        assert ended.codes == [0, 0], ended.err
        first[name] = rows(folder / f"teachers-{name}")[0]["distill/divergence"]
    assert 0.2 * first["one"] < first["two"] < 0.8 * first["one"]


def test_a_row_without_a_teacher_is_named(folder: Path) -> None:
    (folder / "odd.jsonl").write_text(json.dumps({"prompt": "a", "data_source": "maths"}) + "\n")
    teacher = {"call": "teachers", "args": {"models": {"math": "teacher"}}}
    changes = {"flow": "distill", "steps": 1, "roles": {"teacher": teacher}, "data": {"files": "odd.jsonl", "batch": 1}}
    ended = run(folder, "odd", 1, **DISTILLED | changes)
    assert ended.codes == [1]
    assert "odd.jsonl:1: role 'teacher' has no teacher for data_source 'maths'; did you mean 'math'" in ended.err


def test_a_plan_shows_the_bytes_of_the_likeliest_tokens(folder: Path) -> None:
    from distflow.run.program import Program

    path = folder / "planned.yaml"
    (folder / "planned.yaml").write_text(yaml.safe_dump(CONFIG | DISTILLED | {"flow": "gkd", "algo": {"k": 8}}))
    sizes = Program.load(path).plan(1).bytes
    assert sizes["teacher_top_ids"] == sizes["teacher_top_logprobs"] == 8 * 4 * 8 / 2


def test_the_reference_may_be_another_model(folder: Path) -> None:
    common: dict[str, Any] = {"flow": "flows.py:averaged", "steps": 1, "train": {"ema": 0.5}}
    average = AVERAGED["roles"]
    for name, roles in (("same", average), ("other", average | {"reference": {"model": "teacher"}})):
        ended = run(folder, name, 1, roles=roles, **common)
        assert ended.codes == [0], ended.err
    assert rows(folder / "same")[0]["ema/ref"] == 0
    assert rows(folder / "other")[0]["ema/ref"] > 0.1


def test_a_moving_average_that_hardly_moves_is_the_first_model(folder: Path) -> None:
    ended = run(folder, "slow", 2, **AVERAGED | {"steps": 2, "train": {"lr": 1e-2, "ema": 1 - 1e-12}})
    assert ended.codes == [0, 0], ended.err
    first, second = rows(folder / "slow")
    assert (first["ema/ref"], first["ema/old"]) == (0, 0)
    assert second["ema/ref"] == 0
    assert second["ema/old"] > 1e-3  # the actor itself has moved on, and has its own weights back


@pytest.mark.parametrize("workers", [2, 1])
def test_averages_continue_where_they_were_when_a_run_resumes(folder: Path, workers: int) -> None:
    """The actor's, which is sharded, and that of a user's role, on the same and on another number of workers."""
    if not (folder / "whole").exists():
        assert run(folder, "whole", 2, **AVERAGED).codes == [0, 0]
    name = f"resumed{workers}"
    assert run(folder, name, 2, **AVERAGED | {"steps": 2}).codes == [0, 0]
    ended = run(folder, name, workers, "newest", **AVERAGED)
    assert ended.codes == [0] * workers, ended.err
    for ours, theirs in zip(rows(folder / name), rows(folder / "whole"), strict=True):
        for key in ("average", "ema/old", "ema/ref", "actor/grad_norm"):
            assert ours[key] == (theirs[key] if workers == 2 else pytest.approx(theirs[key], rel=1e-4, abs=1e-4)), key
    mine, other = (
        load_full_tensors(folder / run_name / "checkpoints" / "step_4" / "actor", "ema.")
        for run_name in (name, "whole")
    )
    assert mine.keys() == other.keys() != set()
    for key in mine:
        assert torch.allclose(mine[key], other[key], rtol=1e-4, atol=1e-5), key
    weights = load_full_tensors(folder / "whole" / "checkpoints" / "step_4" / "actor", "weights.")
    assert any(not torch.equal(other[key], weights[key]) for key in weights)


def test_a_state_that_is_not_in_the_checkpoint_is_not_started_anew_in_silence(folder: Path) -> None:
    assert run(folder, "lost", 1, **AVERAGED | {"steps": 2}).codes == [0]
    path = folder / "lost" / "checkpoints" / "step_2"
    shutil.rmtree(path / "average")
    complete = json.loads((path / "complete.json").read_text())
    complete["files"] = {k: v for k, v in complete["files"].items() if not k.startswith("average/")}
    from distflow.checkpoint.store import file_list

    (path / "complete.json").write_text(file_list(2, complete["files"]))
    ended = run(folder, "lost", 1, "newest", **AVERAGED)
    assert ended.codes == [1]
    assert "has no state of the role 'average', so it would silently be re-initialised" in ended.err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": {}}, "node 'actor.ema_logprobs': there is no moving average; set its decay: `train.ema: 0.99`"),
        ({"roles": {"actor": {"model": "teacher"}}}, "roles.actor.model: this role is trained, or built in"),
        ({"roles": {"average": {}}}, "give one of `call` .* and `model`"),
    ],
)
def test_mistakes_are_found_before_anything_is_loaded(folder: Path, changes: dict[str, Any], message: str) -> None:
    from distflow.errors import DistflowError
    from distflow.run.program import Program

    path = folder / "wrong.yaml"
    path.write_text(yaml.safe_dump(CONFIG | AVERAGED | changes))
    with pytest.raises(DistflowError, match=message):
        Program.load(path).plan(1)
