"""An adapter on real workers: it alone is trained, the engine generates with it, and it leaves as PEFT's or merged."""

import json
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import yaml
from distflow.engine.model.parallel import local
from peft import PeftModel
from safetensors import safe_open
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from distflow import cli
from distflow.config import Config
from distflow.config.schema import LoraConfig
from distflow.data.batch import Batch
from distflow.data.context import Context
from distflow.data.transport import Transport
from distflow.engine.model.lora import Adapter, pairs
from distflow.engine.model.source import Source, open_model
from distflow.engine.model.text import ragged
from distflow.engine.policy import Policy
from distflow.engine.role_context import RoleContext
from distflow.engine.weights import slices
from distflow.errors import ConfigError
from distflow.observe.metrics import StepMetrics
from distflow.plan import Layout
from distflow.run import checkpoint
from engine.tiny import with_weights_that_matter
from spawn import spawn
from warm import distflow_run

WORKERS, TOKENS = 3, 6
PROMPTS = [f"{'so ' * i}what is {i}?" for i in range(6)]
MADE: dict[str, Any] = {"arch": "qwen2", "hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 48}


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
        {"lora": {"rank": 3, "alpha": 4, "targets": ["q_proj", "down_proj"]}, "recompute": True, "micro_tokens": 60},
        MADE,
    ),
    "bfloat16": Case(LAST, LAST, {"lora": {}, "dtype": "bfloat16"}),
}
EXACT = ("uneven", "alone")


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
class Found:
    """What a worker saw."""

    trained: list[str]  # parameters with a gradient
    changed: list[str]  # after updates
    base_kept: bool
    handed_over: float  # how far the engine's weights are from W + scale · B @ A
    before: list[list[int]]  # the likeliest responses
    after: list[list[int]]
    token: int  # that was taught
    drawn: list[list[int]]  # responses, by the engine after the updates
    drawn_logprobs: Any
    logprobs: Any  # of the same tokens, by the trainer


class Actor:
    """One worker's part of a policy."""

    def __init__(self, case: Case, rank: int, folder: Path, setup: RoleContext) -> None:
        self.case, self.rank = case, rank
        self.policy = Policy(setup)
        self.context = Context(0, rank, WORKERS, case.trains, 5, StepMetrics(), folder, np.arange(len(PROMPTS)))
        assert self.policy.trainer is not None
        self.trainer = self.policy.trainer

    def generate(self, comm: Transport, temperature: float | None) -> dict[str, Any]:
        """On all of its workers, though only some have a generator."""
        comm.drive(self.policy.hand_over())  # type: ignore[arg-type]
        said = None
        if self.policy.generator:
            ids = np.arange(len(PROMPTS))
            said = self.policy.generate(Batch(ids, ids, {"prompt": PROMPTS}), self.context, temperature, False)
        box = [said]
        dist.broadcast_object_list(box, self.case.generates.ranks[0], self.policy.setup.groups[self.case.trains])
        assert box[0] is not None
        return box[0]

    def teach(self, token: int) -> None:
        cell, cells = self.trainer.layout.cell_of(self.rank), self.trainer.layout.dp
        mine = np.arange(len(PROMPTS))[cell::cells]
        columns = {
            "prompt_tokens": ragged([self.policy.text.encode(PROMPTS[i]) for i in mine]),
            "response_tokens": ragged([[token] * TOKENS] * len(mine)),
        }
        self.policy.update(Batch(mine, mine, columns), self.context, {"loss": "nll", "epochs": 12})

    def base_is_as_read(self) -> bool:
        read = source_of(self.policy.config).reader([spec.name for spec in self.trainer.specs])
        return all(
            torch.equal(local(p), read(spec.name, slices(self.trainer.held.box(spec, self.rank))).float())
            for spec, p in self.trainer.base
        )

    @torch.no_grad()
    def far_from_merged(self, comm: Transport) -> float:
        """What the engine has been given, against the whole matrices by hand."""
        comm.drive(self.policy.hand_over())  # type: ignore[arg-type]
        adapter = {spec.name: p.detach().full_tensor() for spec, p in self.trainer.named}
        beside, generator = pairs(adapter), self.policy.generator
        read = source_of(self.policy.config).reader([spec.name for spec in self.trainer.specs])
        assert self.trainer.adapter is not None
        far = 0.0
        for spec in generator.specs if generator else ():
            assert generator is not None
            box = slices(generator.held.box(spec, self.rank))
            want = read(spec.name, tuple(map(slice, spec.shape))).float()
            if spec.name in beside:
                b, a = beside[spec.name]
                want = want + self.trainer.adapter.scale * (b @ a)
            got = generator.model.get_parameter(spec.name)
            assert got.dtype == generator.dtype
            far = max(far, float((got - want[box].to(generator.dtype)).abs().max()))
        return far


def on_a_worker(rank: int, folder: Path) -> dict[str, Found]:
    comm = Transport([case.ranks for case in CASES.values()], torch.device("cpu"), lambda ranks: nullcontext())
    everybody = checkpoint.Team(tuple(range(dist.get_world_size())), dist.new_group())
    found = {}
    for name, case in CASES.items():
        config, layouts = config_of(case, folder), {case.trains, case.generates}
        meshes, groups = {}, {}
        for layout in sorted(layouts, key=str):
            ranks = torch.tensor(layout.ranks).view(layout.dp, layout.tp)
            meshes[layout] = DeviceMesh("cpu", ranks, mesh_dim_names=("dp", "tp"))
            groups[layout] = dist.new_group(list(layout.ranks))
        actor = None
        if rank in case.ranks:
            where = {"update": case.trains, "logprobs": case.trains, "generate": case.generates}
            setup = RoleContext("actor", rank, config, 1, where, meshes, groups, torch.device("cpu"), source_of(config))
            actor = Actor(case, rank, folder, setup)
            found[name] = learn(actor, comm)
        team = checkpoint.Team(case.trains.ranks, groups[case.trains])
        saver = checkpoint.Saver(folder / name / "checkpoints", rank, everybody, {"actor": team})
        part = actor.policy.part() if actor else None
        saver.save(1, {"actor": part} if part else {}, {}, lambda place: None)
        saver.wait()
    return found


def learn(actor: Actor, comm: Transport) -> Found:
    trainer = actor.trainer
    token = actor.policy.text.encode("7")[0]
    first = {name: part.clone() for name, part in trainer.parts().items()}
    before = actor.generate(comm, 0.0)
    actor.teach(token)
    after, drawn = actor.generate(comm, 0.0), actor.generate(comm, None)
    ids = np.arange(len(PROMPTS))
    both = {f: drawn[f] for f in ("prompt_tokens", "response_tokens")}
    return Found(
        trained=[n for n, p in trainer.model.lm.named_parameters() if p.requires_grad],
        changed=[n for n, part in trainer.parts().items() if not torch.equal(part, first[n])],
        base_kept=actor.base_is_as_read(),
        handed_over=actor.far_from_merged(comm),
        before=[row.tolist() for row in before["response_tokens"]],
        after=[row.tolist() for row in after["response_tokens"]],
        token=token,
        drawn=[row.tolist() for row in drawn["response_tokens"]],
        drawn_logprobs=drawn["rollout_logprobs"].joined().numpy(),
        logprobs=actor.policy.logprobs(Batch(ids, ids, both)).joined().numpy(),
    )


@dataclass(frozen=True)
class Results:
    folder: Path
    found: dict[str, list[Found]]  # of the workers that have a part in it


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("lora")
    made = source_of(config_of(CASES["alone"], folder))
    model = AutoModelForCausalLM.from_config(made.config, dtype=torch.float32)
    with_weights_that_matter(model)
    model.bfloat16().save_pretrained(folder / "saved")
    made.tokenizer.save_pretrained(folder / "saved")
    of_ranks = spawn(WORKERS, on_a_worker, folder)
    return Results(folder, {name: [r[name] for r in of_ranks if name in r] for name in CASES})


def skeleton_names(name: str, folder: Path) -> list[str]:
    config = config_of(CASES[name], folder)
    assert config.train.lora is not None
    return [spec.name for spec in Adapter(source_of(config).skeleton(), config.train.lora).specs]


@pytest.mark.parametrize("name", CASES)
def test_only_the_adapter_is_trained(results: Results, name: str) -> None:
    names = skeleton_names(name, results.folder)
    layers = 2 * len(CASES[name].train["lora"].get("targets", range(7)))
    assert len(names) == 2 * layers
    for worker in results.found[name]:
        assert worker.trained == names
        assert worker.base_kept
    changed = {n for worker in results.found[name] for n in worker.changed}
    assert changed == set(names)


@pytest.mark.parametrize("name", CASES)
def test_the_engine_generates_with_what_was_just_learned(results: Results, name: str) -> None:
    for worker in results.found[name]:
        assert all(row != [worker.token] * TOKENS for row in worker.before)
        assert all(row == [worker.token] * TOKENS for row in worker.after)
        assert worker.handed_over < (1e-5 if name in EXACT else 1e-2)
        assert len({len(row) for row in worker.drawn} | {tuple(row) for row in worker.drawn}) > 1
        far = np.abs(worker.drawn_logprobs - worker.logprobs).max()
        assert far < (1e-4 if name in EXACT else 0.2)


def logprobs(model: Any, rows: list[list[int]], tokenizer: Any) -> Iterator[float]:
    for prompt, row in zip(PROMPTS, rows, strict=True):
        tokens = torch.tensor([[*tokenizer(prompt)["input_ids"], *row]])
        with torch.no_grad():
            said = torch.log_softmax(model(tokens).logits[0, -len(row) - 1 : -1], -1)
        yield from said.gather(1, tokens[0, -len(row) :, None])[:, 0].tolist()


def exported(*args: Path | str) -> int:
    with pytest.raises(SystemExit) as e:
        cli.main(["export", *map(str, args)])
    assert isinstance(e.value.code, int)
    return e.value.code


@pytest.mark.parametrize("name", EXACT)
def test_merged_it_says_what_the_trainer_says(results: Results, name: str, tmp_path: Path) -> None:
    """The model that is made on the spot, too, which is nowhere on disk."""
    assert exported(results.folder / name, tmp_path / "out") == 0
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto", output_loading_info=True)
    model, info = loaded
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    worker, tokenizer = results.found[name][0], source_of(config_of(CASES[name], results.folder)).tokenizer
    assert np.allclose(list(logprobs(model, worker.drawn, tokenizer)), worker.logprobs, atol=1e-4)


def test_peft_reads_the_adapter(results: Results, tmp_path: Path) -> None:
    assert exported(results.folder / "uneven", tmp_path / "adapter", "--adapter") == 0
    assert sorted(p.name for p in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    said = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (said["r"], said["lora_alpha"], said["base_model_name_or_path"]) == (4, 8, str(results.folder / "saved"))
    base = AutoModelForCausalLM.from_pretrained(results.folder / "saved", dtype=torch.float32)
    model = PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    with safe_open(tmp_path / "adapter" / "adapter_model.safetensors", "pt") as file:
        assert {n.replace("lora_A", "lora_A.default").replace("lora_B", "lora_B.default") for n in file.keys()} == {  # noqa: SIM118
            n for n, _ in model.named_parameters() if "lora_" in n
        }
    worker, tokenizer = results.found["uneven"][0], source_of(config_of(CASES["uneven"], results.folder)).tokenizer
    assert np.allclose(list(logprobs(model, worker.drawn, tokenizer)), worker.logprobs, atol=1e-4)


def test_a_base_that_was_moved_is_asked_for(
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


def test_a_run_learns_by_examples_with_an_adapter(results: Results, tmp_path: Path) -> None:
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
        said = model.generate(**tokens, max_new_tokens=8, do_sample=False)[0, tokens.input_ids.shape[1] :]
        assert tokenizer.decode(said, skip_special_tokens=True) == response


@pytest.mark.parametrize(
    ("arch", "names"),
    [("gpt_neox", {"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"}), ("gpt2", set())],
)
def test_all_linear_layers_but_the_last(arch: str, names: set[str], tmp_path: Path) -> None:
    config = AutoConfig.for_model(arch, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=61)
    skeleton = Source(arch, config, source_of(config_of(CASES["alone"], tmp_path)).tokenizer).skeleton()
    if names:
        assert {spec.name.split(".")[-4] for spec in Adapter(skeleton, LoraConfig()).specs} == names
    else:
        with pytest.raises(ConfigError, match=f"a {arch} model has no nn.Linear layers; leave it out"):
            Adapter(skeleton, LoraConfig())


def test_an_adapter_starts_alike_in_any_part(tmp_path: Path) -> None:
    """B is 0; A is drawn as PEFT does, each from its own noise."""
    source = source_of(config_of(CASES["alone"], tmp_path))
    adapter = Adapter(source.skeleton(), LoraConfig(rank=64))

    def start(seed: int) -> dict[str, Tensor]:
        read = adapter.at_first(seed)
        return {s.name: read(s.name, tuple(map(slice, s.shape))) for s in adapter.specs}

    first, read = start(0), adapter.at_first(0)
    for spec in adapter.specs:
        whole = first[spec.name]
        assert torch.equal(read(spec.name, (slice(3, 9), slice(2, 5))), whole[3:9, 2:5])
        if ".lora_B." in spec.name:
            assert not whole.any()
        else:
            bound = spec.shape[1] ** -0.5
            assert 0.95 * bound < float(whole.abs().max()) <= bound
            assert torch.equal(start(0)[spec.name], whole)
            assert not torch.equal(start(1)[spec.name], whole)
    drawn = [w for name, w in first.items() if ".lora_A." in name and w.shape[1] == 32]
    assert len({float(w[0, 0]) for w in drawn}) == len(drawn)
