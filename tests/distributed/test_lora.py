"""LoRA on real workers: only the adapter is trained, the engine generates with it, and it is exported or merged."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import yaml
from peft import PeftModel
from safetensors import safe_open
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM, AutoTokenizer

from distflow import cli
from distflow.batch.batch import Batch
from distflow.batch.context import Context
from distflow.checkpoint.store import load_full_tensors
from distflow.checkpoint.writer import CheckpointWriter
from distflow.comm.transport import Transport
from distflow.config import Config
from distflow.model.lora import LoraAdapter, adapter_pairs
from distflow.model.source import Source, open_model
from distflow.model.text import ragged
from distflow.observe.metrics import StepMetrics
from distflow.plan import Layout
from distflow.plan.communicators import MeshShape
from distflow.plan.topology import Topology
from distflow.roles.actor import Actor
from distflow.roles.context import RoleContext
from distflow.rollout.builtin.engine import BuiltinEngine
from distflow.train.fsdp import local, local_shards
from distflow.weights.shards import slices
from spawn import make_transport, spawn
from tiny import randomize_weights
from warm import distflow_run

WORKERS, TOKENS = 3, 6
PROMPTS = [f"{'so ' * i}what is {i}?" for i in range(6)]
RANDOM: dict[str, Any] = {"arch": "qwen2", "hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 48}


@dataclass(frozen=True)
class Case:
    trains: Layout
    generates: Layout
    train: dict[str, Any]
    model: Any = "saved"

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({*self.trains.ranks, *self.generates.ranks}))


ALONE, LAST = Layout((0,), 1), Layout((1, 2), 2)
CASES = {
    # Of a matrix with 16 rows, shards have 6, 6 and 4; of A, 2, 2 and none.
    "uneven": Case(Layout((0, 1, 2), 3), Layout((0, 1), 1, 2), {"lora": {"rank": 4}}),
    "alone": Case(
        ALONE,
        ALONE,
        {
            "lora": {"rank": 3, "alpha": 4, "targets": ["q_proj", "down_proj"], "use_rslora": True},
            "gradient_checkpointing": True,
            "micro_tokens": 60,
        },
        RANDOM,
    ),
    "cut": Case(Layout((1, 2), 1, 2), Layout((1, 2), 2), {"lora": {"rank": 4}}),
    "bfloat16": Case(LAST, LAST, {"lora": {}, "dtype": "bfloat16"}),
}
EXACT = ("uneven", "alone", "cut")


def source_of(config: Config) -> Source:
    assert config.model is not None
    return open_model(config.model, lambda: iter(PROMPTS), config.base, config.seed)


def config_of(case: Case, folder: Path) -> Config:
    return Config.model_validate(
        {
            "flow": "grpo",
            "name": "test",
            "data": {"files": "none.jsonl", "batch": len(PROMPTS)},
            "model": case.model,
            "rollout": {"max_tokens": TOKENS},
            "train": {"lr": 0.05, **case.train},
            "seed": 5,
            "base": folder,
        }
    )


@dataclass
class Outcome:
    """What a worker observed."""

    trained: list[str]  # parameters with a gradient
    changed: list[str]  # after updates
    base_kept: bool
    merge_error: float  # the largest difference of the engine's weights from W + scale · B @ A
    before: list[list[int]]  # greedy responses
    after: list[list[int]]
    token: int  # that was trained
    sampled: list[list[int]]  # responses, by the engine after the updates
    sampled_logprobs: Any
    logprobs: Any  # of the same tokens, by the trainer


class Worker:
    """One worker's part of an actor."""

    def __init__(
        self, case: Case, role: RoleContext, transport: Transport, trained_together: dist.ProcessGroup
    ) -> None:
        self.case, self.role, self.transport, self.trained_together = case, role, transport, trained_together
        self.actor = Actor(role)
        groups = np.arange(len(PROMPTS))
        self.ctx = Context(0, role.rank, WORKERS, case.trains, 5, StepMetrics(), role.base, groups)
        assert self.actor.trainer is not None
        self.trainer = self.actor.trainer

    def sync_weights(self) -> None:
        self.transport.run(self.actor.sync_weights(0))  # type: ignore[arg-type]

    def generate(self, temperature: float | None) -> dict[str, Any]:
        """Returns the responses on all workers, though only some have an engine."""
        self.sync_weights()
        rollout = None
        if self.actor.policy.engine:
            ids = np.arange(len(PROMPTS))
            rollout = self.actor.generate(Batch(ids, ids, {"prompt": PROMPTS}), self.ctx, temperature)
        box = [rollout]
        dist.broadcast_object_list(box, self.case.generates.ranks[0], self.trained_together)
        assert box[0] is not None
        return box[0]

    def teach(self, token: int) -> None:
        replica, replicas = self.case.trains.replica_of(self.role.rank), self.case.trains.dp
        mine = np.arange(len(PROMPTS))[replica::replicas]
        columns = {
            "prompt_tokens": ragged([self.actor.policy.text.encode(PROMPTS[i]) for i in mine]),
            "response_tokens": ragged([[token] * TOKENS] * len(mine)),
        }
        self.actor.update(Batch(mine, mine, columns), self.ctx, loss="nll", epochs=12)

    def base_is_as_read(self) -> bool:
        read = self.role.model.reader({spec.name: spec.shape for spec in self.trainer.specs})
        return all(
            torch.equal(local(p), read(spec.name, slices(self.trainer.shards.box(spec, self.role.rank))).float())
            for spec, p in self.trainer.base
        )

    @torch.no_grad()
    def merge_error(self) -> float:
        """Compares the engine's weights with W + scale · B @ A, computed from complete matrices."""
        self.sync_weights()
        pairs = adapter_pairs({spec.name: p.detach().full_tensor() for spec, p in self.trainer.trained})
        read = self.role.model.reader({spec.name: spec.shape for spec in self.trainer.specs})
        engine, error = self.actor.policy.engine, 0.0
        assert self.trainer.adapter is not None
        if engine is None:
            return error
        assert isinstance(engine, BuiltinEngine)
        weights = engine.weights
        for spec in weights.specs:
            want = read(spec.name, tuple(map(slice, spec.shape))).float()
            if spec.name in pairs:
                b, a = pairs[spec.name]
                want = want + self.trainer.adapter.scale * (b @ a)
            part = want[slices(weights.shards.box(spec, self.role.rank))]
            got = weights.model.get_parameter(spec.name)
            assert got.dtype == weights.dtype
            error = max(error, float((got - part.to(weights.dtype)).abs().max()))
        return error


def run_cases(rank: int, folder: Path) -> dict[str, Outcome]:
    """Runs all cases on one worker; all workers take part in making process groups and checkpoints."""
    transport = make_transport(rank, WORKERS)
    all_ranks = range(dist.get_world_size())
    background = make_transport(rank, len(all_ranks))
    outcomes = {}
    for name, case in CASES.items():
        meshes, process_groups = {}, {}
        for layout in sorted({case.trains, case.generates}, key=str):
            ranks = torch.tensor(layout.ranks).view(layout.dp, layout.tp)
            meshes[MeshShape(layout)] = DeviceMesh("cpu", ranks, mesh_dim_names=("dp", "tp"))
            process_groups[layout] = dist.new_group(list(layout.ranks))
        state = None
        if rank in case.ranks:
            role = role_context(case, rank, folder, meshes)
            worker = Worker(case, role, transport, process_groups[case.trains])
            outcomes[name] = learn(worker)
            state = worker.actor.state()
        roles = {"actor": case.trains.ranks}
        writer = CheckpointWriter(folder / name / "checkpoints", rank, all_ranks, roles, background.run)
        writer.save(1, writer.copy({"actor": state} if state else {}), {}, lambda place: None)
        writer.wait()
    return outcomes


def role_context(case: Case, rank: int, folder: Path, meshes: dict[MeshShape, DeviceMesh]) -> RoleContext:
    config = config_of(case, folder)
    return RoleContext(
        name="actor",
        rank=rank,
        layouts={"update": case.trains, "logprobs": case.trains, "generate": case.generates},
        meshes=meshes,
        topology=Topology.single(WORKERS),
        device=torch.device("cpu"),
        source=source_of(config),
        rollout=config.rollout,
        train=config.train,
        critic=config.critic,
        max_prompt=None,
        rendered=False,
        chat_template_kwargs={},
        steps=1,
        seed=config.seed,
        base=folder,
    )


def learn(worker: Worker) -> Outcome:
    trainer = worker.trainer
    token = worker.actor.policy.text.encode("7")[0]
    first = {name: shard.clone() for name, shard in local_shards(trainer.trained).items()}
    before = worker.generate(0.0)
    worker.teach(token)
    after, sampled = worker.generate(0.0), worker.generate(None)
    ids = np.arange(len(PROMPTS))
    tokens = {f: sampled[f] for f in ("prompt_tokens", "response_tokens")}
    return Outcome(
        trained=[n for n, p in trainer.model.lm.named_parameters() if p.requires_grad],
        changed=[n for n, shard in local_shards(trainer.trained).items() if not torch.equal(shard, first[n])],
        base_kept=worker.base_is_as_read(),
        merge_error=worker.merge_error(),
        before=[row.tolist() for row in before["response_tokens"]],
        after=[row.tolist() for row in after["response_tokens"]],
        token=token,
        sampled=[row.tolist() for row in sampled["response_tokens"]],
        sampled_logprobs=sampled["rollout_logprobs"].joined().numpy(),
        logprobs=worker.actor.logprobs(Batch(ids, ids, tokens)).joined().numpy(),
    )


@dataclass(frozen=True)
class Results:
    folder: Path
    outcomes: dict[str, list[Outcome]]  # of the workers that have a part in it


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("lora")
    source = source_of(config_of(CASES["alone"], folder))
    model = AutoModelForCausalLM.from_config(source.config, dtype=torch.float32)
    randomize_weights(model)
    model.bfloat16().save_pretrained(folder / "saved")
    source.tokenizer.save_pretrained(folder / "saved")
    by_rank = spawn(WORKERS, run_cases, folder)
    return Results(folder, {name: [r[name] for r in by_rank if name in r] for name in CASES})


def skeleton_names(name: str, folder: Path) -> list[str]:
    config = config_of(CASES[name], folder)
    assert config.train.lora is not None
    return [spec.name for spec in LoraAdapter(source_of(config).skeleton(), config.train.lora).specs]


@pytest.mark.parametrize("name", CASES)
def test_only_the_adapter_is_trained(results: Results, name: str) -> None:
    names = skeleton_names(name, results.folder)
    layers = 2 * len(CASES[name].train["lora"].get("targets", range(7)))
    assert len(names) == 2 * layers
    for worker in results.outcomes[name]:
        assert worker.trained == names
        assert worker.base_kept
    changed = {n for worker in results.outcomes[name] for n in worker.changed}
    assert changed == set(names)


@pytest.mark.parametrize("name", CASES)
def test_the_engine_generates_with_what_was_just_learned(results: Results, name: str) -> None:
    for worker in results.outcomes[name]:
        assert all(row != [worker.token] * TOKENS for row in worker.before)
        assert all(row == [worker.token] * TOKENS for row in worker.after)
        assert worker.merge_error < (1e-5 if name in EXACT else 1e-2)
        assert len({len(row) for row in worker.sampled} | {tuple(row) for row in worker.sampled}) > 1
        mismatch = np.abs(worker.sampled_logprobs - worker.logprobs).max()
        assert mismatch <= {"alone": 0, "uneven": 1e-4}.get(name, 0.2)  # the second generates with tp 2


def logprobs(model: Any, rows: list[list[int]], tokenizer: Any) -> Iterator[float]:
    for prompt, row in zip(PROMPTS, rows, strict=True):
        tokens = torch.tensor([[*tokenizer(prompt)["input_ids"], *row]])
        with torch.no_grad():
            log_p = torch.log_softmax(model(tokens).logits[0, -len(row) - 1 : -1], -1)
        yield from log_p.gather(1, tokens[0, -len(row) :, None])[:, 0].tolist()


def exported(*args: Path | str) -> int:
    with pytest.raises(SystemExit) as e:
        cli.main(["export", *map(str, args)])
    assert isinstance(e.value.code, int)
    return e.value.code


@pytest.mark.parametrize("name", EXACT)
def test_a_merged_model_gives_the_log_probs_of_the_trainer(results: Results, name: str, tmp_path: Path) -> None:
    """Also for a base model with random weights, which is nowhere on disk."""
    assert exported(results.folder / name, tmp_path / "out", "--dtype", "float32") == 0
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto", output_loading_info=True)
    model, info = loaded
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    worker, tokenizer = results.outcomes[name][0], source_of(config_of(CASES[name], results.folder)).tokenizer
    assert np.allclose(list(logprobs(model, worker.sampled, tokenizer)), worker.logprobs, atol=1e-4)


def test_an_adapter_that_tensor_parallelism_cuts_learns_the_same(results: Results) -> None:
    ours, theirs = (
        load_full_tensors(results.folder / name / "checkpoints" / "step_1" / "actor", "weights.")
        for name in ("cut", "uneven")
    )
    assert ours.keys() == theirs.keys() != set()
    for name in ours:
        assert torch.allclose(ours[name], theirs[name], rtol=1e-3, atol=1e-3), name


def test_peft_reads_the_adapter(results: Results, tmp_path: Path) -> None:
    assert exported(results.folder / "uneven", tmp_path / "adapter", "--adapter") == 0
    assert sorted(p.name for p in (tmp_path / "adapter").iterdir()) == [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (
        4,
        8,
        str(results.folder / "saved"),
    )
    base = AutoModelForCausalLM.from_pretrained(results.folder / "saved", dtype=torch.float32)
    model = PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    with safe_open(tmp_path / "adapter" / "adapter_model.safetensors", "pt") as file:
        assert {n.replace("lora_A", "lora_A.default").replace("lora_B", "lora_B.default") for n in file.keys()} == {  # noqa: SIM118
            n for n, _ in model.named_parameters() if "lora_" in n
        }
    worker, tokenizer = results.outcomes["uneven"][0], source_of(config_of(CASES["uneven"], results.folder)).tokenizer
    assert np.allclose(list(logprobs(model, worker.sampled, tokenizer)), worker.logprobs, atol=1e-4)


def test_a_base_model_that_was_moved_has_to_be_named(
    results: Results, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(results.folder / "uneven", tmp_path / "run")
    adapter = tmp_path / "run/checkpoints/step_1/actor/adapter"
    here, elsewhere = results.folder / "saved", results.folder / "elsewhere"
    here.rename(elsewhere)
    assert exported(tmp_path / "run", tmp_path / "out") == 2
    assert f"belongs to the model 'saved', which is no longer in {here}; say where it is: --base" in (
        capsys.readouterr().err
    )
    assert exported(tmp_path / "run", tmp_path / "out", "--base", elsewhere) == 0
    elsewhere.rename(here)
    shutil.rmtree(adapter)
    assert exported(tmp_path / "run", tmp_path / "alone", "--adapter") == 2
    assert "is missing; export another step: there is none" in capsys.readouterr().err


PAIRS = {"one and one is ": "two", "two and one is ": "three", "two and two is ": "four"}


def test_a_run_learns_from_examples_with_an_adapter(results: Results, tmp_path: Path) -> None:
    rows = [{"prompt": p, "response": r, "answer": r} for p, r in PAIRS.items()]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows * 2))
    (tmp_path / "same.py").write_text(
        "def same(solution_str, ground_truth):\n    return solution_str == ground_truth\n"
    )
    config = {
        "flow": "sft",
        "model": str(results.folder / "saved"),
        "data": {"files": "pairs.jsonl", "batch": 6},
        "rollout": {"max_tokens": 8},
        "train": {"lr": 2e-2, "lora": {"rank": 8, "targets": "all-linear"}},
        "reward": "same.py:same",
        "eval": {"files": "pairs.jsonl", "every": 100},
        "steps": 24,
        "run_dir": str(tmp_path / "run"),
        "wait_limit_s": 60,
    }
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(config))
    ended = distflow_run(tmp_path / "sft.yaml", workers=2)
    assert ended.codes == [0, 0], ended.err
    metrics = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [m["val/all/score"] for m in metrics if "val/all/score" in m] == [0, 1]
    assert exported(tmp_path / "run", tmp_path / "out") == 0
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    for prompt, response in PAIRS.items():
        tokens = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        response_tokens = model.generate(**tokens, max_new_tokens=8, do_sample=False)[0, tokens.input_ids.shape[1] :]
        assert tokenizer.decode(response_tokens, skip_special_tokens=True) == response
