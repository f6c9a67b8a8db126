"""The trainer on real workers: any layout has the gradient of a plain model, and an exported model agrees."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM, AutoTokenizer

from distflow import cli
from distflow.algo.correction import Correction
from distflow.algo.losses import policy
from distflow.algo.options import AggregateBy, Aggregation
from distflow.batch.batch import Batch, Column, Ragged
from distflow.batch.branches import branches_column
from distflow.batch.context import Context
from distflow.checkpoint.writer import CheckpointWriter
from distflow.config.schema import TrainConfig
from distflow.model.description import describe
from distflow.model.source import Source
from distflow.model.stored_names import read_stacked
from distflow.model.tokenizer import train_tokenizer
from distflow.observe.metrics import StepMetrics
from distflow.plan.layout import Layout
from distflow.train import fsdp
from distflow.train.trainer import RankMesh, Trainer, TrainerOptions
from distflow.train.update_spec import UpdateSpec
from distflow.weights.shards import slices
from spawn import make_transport, spawn
from tiny import VOCABULARY, config_of, pair

# With tied embeddings; with norms that all heads share; with experts.
ARCHITECTURES = ("qwen2", "qwen3", "qwen3_moe")
TEMPERATURE = 0.8
CONSTANTS: dict[str, Any] = {"clip": 0.1, "kl": 0.05, "entropy": 0.02}
WHOLE = 1 << 20  # tokens: all samples at once
ALL = 1 << 40  # bytes: the whole model


def samples(masked: bool = False, branched: bool = False) -> Batch:
    """Of unequal lengths, one of them without a response; `masked`: some of their tokens are context only.

    `branched`: most responses are several sequences, which share beginnings of the prompt or of each other, or nothing.
    """
    draw = np.random.default_rng(3)
    prompts, responses = draw.integers(1, 9, 10), draw.integers(1, 12, 10)
    responses[4] = 0

    def ragged(lengths: Any, value: Callable[[int], Any]) -> Ragged:
        return Ragged.of([torch.tensor(value(n)) for n in lengths])

    tokens = partial(draw.integers, 0, VOCABULARY)
    columns: dict[str, Column] = {
        "prompt_tokens": ragged(prompts, tokens),
        "response_tokens": ragged(responses, tokens),
        "old_logprobs": ragged(responses, lambda n: -4 - draw.random(n, np.float32)),
        "ref_logprobs": ragged(responses, lambda n: -4 - draw.random(n, np.float32)),
        "advantage": torch.tensor(draw.normal(size=10), dtype=torch.float32),
        "rollout_logprobs": ragged(responses, lambda n: -4 - draw.random(n, np.float32)),
    }
    if masked:
        columns["response_mask"] = ragged(responses, lambda n: draw.integers(0, 2, n))
    if branched:
        columns["response_branches"] = branches_column(
            trees := [_tree(draw, *n) for n in zip(prompts, responses, strict=True)]
        )
        for i, tree in enumerate(trees):
            for start, _, shared in tree:  # what nothing comes before was not sampled
                columns["response_mask"][i][start] *= int(shared > 0)
    return Batch(np.arange(10), np.arange(10) // 2, columns)


def _tree(draw: np.random.Generator, prompt: int, response: int) -> list[tuple[int, int, int]]:
    starts = sorted(draw.choice(range(1, response), min(3, response - 1), replace=False)) if response > 1 else []
    sizes, tree = [prompt + (starts[0] if starts else response)], []
    for start, end in zip(starts, [*starts[1:], response], strict=False):
        parent = int(draw.integers(len(sizes)))
        shared = int(draw.choice([0, 1, sizes[parent] - 1, sizes[parent]]))
        tree.append((int(start), parent, shared))
        sizes.append(shared + int(end - start))
    return tree


def sequences(batch: Batch, i: int) -> list[tuple[Tensor, Tensor]]:
    """Each sequence of a sample: its tokens, and which of them are the response's, by place there; -1: none."""
    prompt, response = batch["prompt_tokens"][i], batch["response_tokens"][i]
    tree = batch["response_branches"][i].tolist() if "response_branches" in batch else []
    starts = [0, *(start for start, _, _ in tree)]
    own = [range(a, b) for a, b in zip(starts, [*starts[1:], len(response)], strict=False)]
    paths = [(torch.cat((prompt, response[own[0]])), torch.tensor([-1] * len(prompt) + list(own[0])))]
    for (_, parent, shared), places in zip(tree, own[1:], strict=True):
        before = paths[parent][0][:shared]
        paths.append((torch.cat((before, response[places])), torch.tensor([-1] * shared + list(places))))
    return paths


@dataclass(frozen=True)
class Case:
    """How the work is divided."""

    arch: str
    dp: int = 1
    tp: int = 1
    micro_tokens: int = WHOLE
    dtype: str = "float32"
    gradient_checkpointing: bool = False
    unit: int = 1  # bytes of parameters that are gathered together, at least; so few that each layer is by itself
    correction: Correction | None = None
    masked: bool = False
    branched: bool = False
    mean_over: AggregateBy | None = None  # what seq-mean-token-mean is the mean over; None: token-mean
    sp: int = 1

    def __str__(self) -> str:
        more = f"{' gradient checkpointing' * self.gradient_checkpointing}{' bfloat16' * (self.dtype != 'float32')}"
        more += f" {self.correction.kind}" if self.correction else ""
        more += " masked" * self.masked + " branched" * self.branched + f" {self.mean_over}" * bool(self.mean_over)
        more += "" if self.unit == 1 else " at once" if self.unit == ALL else " two by two"
        tokens = "whole" if self.micro_tokens == WHOLE else self.micro_tokens
        return f"{self.arch} dp{self.dp} {f'sp{self.sp} ' * (self.sp > 1)}tp{self.tp} {tokens}{more}"

    @property
    def layout(self) -> Layout:
        return Layout(tuple(range(self.dp * self.sp * self.tp)), self.dp, self.tp, self.sp)


SEQUENCE_LAYOUTS = ((1, 2, 1, WHOLE), (1, 4, 1, 5), (2, 2, 1, 16), (1, 2, 2, 12))  # dp, sp, tp, tokens of a rank
LAYOUTS = ((1, 1, 24), (2, 1, 24), (1, 2, WHOLE), (2, 2, 16))  # dp, tp, tokens at once
TWO = sum(p.numel() * 4 for p in pair("qwen2").ours.model.layers[0].parameters()) + 1
CASES = [
    *(Case(arch, dp, tp, tokens) for arch in ARCHITECTURES for dp, tp, tokens in LAYOUTS),
    Case("qwen2", gradient_checkpointing=True),
    Case("qwen3", 2, 2, 16, gradient_checkpointing=True),
    Case("qwen3_moe", 2, 1, 24, gradient_checkpointing=True),
    Case("mixtral", 2, 2, 16),
    *(Case("qwen2", 2, 1, 24, gradient_checkpointing=g, unit=u) for u in (TWO, ALL) for g in (False, True)),
]
CORRECTIONS = [Correction("sequence", 1.5), Correction("icepop-token", 1.5, 0.5)]
CASES += [Case("qwen2", dp, 1, 24, correction=c) for dp, c in zip((1, 2), CORRECTIONS, strict=True)]
CASES += [Case("qwen2", masked=True), Case("qwen3", 2, 2, 16, masked=True, correction=CORRECTIONS[0])]
for layout in ((1, 1, WHOLE), (2, 2, 16)):
    CASES += [Case("qwen3", *layout, masked=True, branched=True, mean_over=over) for over in (None, "sample", "branch")]
CASES += [
    *(Case(arch, dp, tp, tokens, sp=sp) for arch in ARCHITECTURES for dp, sp, tp, tokens in SEQUENCE_LAYOUTS),
    Case("qwen3", 1, 1, 7, gradient_checkpointing=True, masked=True, branched=True, mean_over="branch", sp=4),
    Case("qwen2", 2, 1, 24, correction=CORRECTIONS[0], sp=2),
    *(Case(arch, 1, 1, tokens, sp=3) for arch, tokens in (("qwen2", WHOLE), ("qwen3", 5))),  # of 4 heads
]
BFLOAT16 = [Case("qwen3", dtype="bfloat16"), Case("qwen2", 2, 2, 24, dtype="bfloat16")]

Parts = dict[str, tuple[tuple[slice, ...], Any]]  # of a worker: which part of a parameter, and its values


def make_trainer(case: Case, rank: int, folder: Path, **config: Any) -> Trainer | None:
    """Makes a worker's part of a trainer; None on a worker that has none."""
    layout = case.layout
    ranks = torch.tensor(layout.ranks)
    mesh = DeviceMesh("cpu", ranks.view(-1, layout.tp), mesh_dim_names=("dp", "tp"))
    sequences = None
    if layout.sp > 1:
        dims = DeviceMesh("cpu", ranks.view(layout.dp, layout.sp, layout.tp), mesh_dim_names=("dp", "sp", "tp"))
        sequences = dims.get_group("sp") if rank in layout.ranks else None
    if rank not in layout.ranks:
        return None
    config |= {f: getattr(case, f) for f in ("micro_tokens", "dtype", "gradient_checkpointing")}
    with patch.object(fsdp, "UNIT", case.unit):
        train, model = TrainConfig.model_validate(config), source(case.arch, folder)
        place = RankMesh(layout, mesh, rank, sequences)
        return Trainer("actor", model, place, TrainerOptions(train, temperature=TEMPERATURE))


def source(arch: str, folder: Path) -> Source:
    return Source(arch, config_of(arch), train_tokenizer(iter(["so it is"]), 0), folder / arch)


def share_of(rank: int, batch: Batch, layout: Layout) -> Batch:
    """Returns the share of a data-parallel replica, with more samples for the first."""
    replica, replicas = layout.replica_of(rank), layout.dp
    return batch if replicas == 1 else batch.select(np.arange(7) if replica == 0 else np.arange(7, 10))


def update_spec(
    mini_batches: int = 1, epochs: int = 1, mean_over: AggregateBy | None = None, **rest: Any
) -> UpdateSpec:
    total = 2 * mini_batches * epochs  # of two steps
    if mean_over:
        rest["aggregate_by"] = mean_over
    aggregate: Aggregation = "seq-mean-token-mean" if mean_over else "token-mean"
    return UpdateSpec(policy, CONSTANTS, aggregate, 12, total, mini_batches, epochs, **rest)


def context(rank: int, layout: Layout, folder: Path) -> Context:
    groups = np.unique(samples().groups)
    return Context(0, rank, 4, layout, 0, StepMetrics(), folder, groups)


def in_parts(trainer: Trainer, rank: int, values: list[Tensor]) -> Parts:
    specs = [spec for spec, _ in trainer.trained]
    boxes = [slices(trainer.shards.box(spec, rank)) for spec in specs]
    return {s.name: (box, v.numpy()) for s, box, v in zip(specs, boxes, values, strict=True)}


def gradient(rank: int, case: Case, folder: Path) -> tuple[Parts, list[str], float] | None:
    """Returns this worker's part of it, the dtypes of its weights, and the norm in the metrics."""
    trainer = make_trainer(case, rank, folder, clip_grad=0.0)
    if trainer is None:
        return None
    grads: list[Tensor] = []

    def keep() -> None:
        grads.extend(s.grad.detach().clone() for s in trainer.optimized if s.grad is not None)

    assert trainer.optimizer is not None
    trainer.optimizer.step = keep  # type: ignore[method-assign, assignment]
    ctx = context(rank, case.layout, folder)
    batch = share_of(rank, samples(case.masked, case.branched), case.layout)
    trainer.update(batch, update_spec(correction=case.correction, mean_over=case.mean_over), ctx)
    norm, count = ctx.metrics.totals["actor/grad_norm", "mean"]  # type: ignore[attr-defined]
    dtypes = [str(t.dtype) for t in (*fsdp.local_shards(trainer.trained).values(), *grads)]
    return in_parts(trainer, rank, grads), dtypes, norm / count


def learn(rank: int, case: Case, folder: Path) -> tuple[Parts, list[Any]] | None:
    """Trains on two mini-batches, twice over, in two steps; returns the weights and log-probs of its samples."""
    trainer = make_trainer(case, rank, folder, lr=2e-3, eps=1e-2, warmup=2)
    if trainer is None:
        return None
    batch = share_of(rank, samples(), case.layout)
    for _ in range(2):
        trainer.update(batch, update_spec(2, 2), context(rank, case.layout, folder))
    assert trainer.updates == 8
    logprobs = trainer.infer(batch)
    if case.dp == case.tp == 2:
        save_checkpoints(trainer, rank, folder / f"{case.arch}-run" / "checkpoints")
    return in_parts(trainer, rank, list(trainer.weights().values())), [row.numpy() for row in logprobs]


def save_checkpoints(trainer: Trainer, rank: int, folder: Path) -> None:
    ranks = trainer.layout.ranks
    writer = CheckpointWriter(folder, rank, ranks, {"actor": ranks}, make_transport(rank, 4).run)
    state = replace(trainer.state(), describe=partial(describe, source=trainer.source, adapter=None))
    for step in (3, 7):
        writer.save(step, writer.copy({"actor": state}), {}, lambda place: None)
    writer.wait()


def on_a_worker(rank: int, folder: Path) -> tuple[list[Any], list[Any]]:
    learners = [Case(arch, dp, tp, 24) for arch in ARCHITECTURES for dp, tp in ((1, 1), (2, 2))]
    return [gradient(rank, c, folder) for c in [*CASES, *BFLOAT16]], [learn(rank, c, folder) for c in learners]


@dataclass(frozen=True)
class Results:
    folder: Path
    gradients: dict[Case, list[tuple[Parts, list[str], float]]]  # of the workers that have a part in it
    learnt: list[list[tuple[Parts, list[Any]]]]  # of each architecture, by one worker and by four


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Runs all cases in four processes, started once."""
    folder = tmp_path_factory.mktemp("training")
    for arch in (*ARCHITECTURES, "mixtral"):
        pair(arch).eager.save_pretrained(folder / arch)
    of_ranks = spawn(4, on_a_worker, folder)
    gradients = {case: [g[i] for g, _ in of_ranks if g[i] is not None] for i, case in enumerate([*CASES, *BFLOAT16])}
    return Results(folder, gradients, [[w[i] for _, w in of_ranks if w[i] is not None] for i in range(6)])


def whole(shapes: dict[str, Any], parts: list[Parts], rtol: float = 1e-5) -> dict[str, Tensor]:
    """Joins the parts of all workers to parameters; replicas agree."""
    parameters = {}
    for name, shape in shapes.items():
        value = torch.full(shape, torch.nan)
        for worker in parts:
            box, part = worker[name]
            there = value[box]
            known = ~there.isnan()
            assert torch.allclose(there[known], torch.from_numpy(part)[known], rtol=rtol, atol=1e-7), name
            value[box] = torch.from_numpy(part)
        assert not value.isnan().any(), name
        parameters[name] = value
    return parameters


def by_hand(
    arch: str,
    dtype: torch.dtype = torch.float64,
    correction: Correction | None = None,
    masked: bool = False,
    branched: bool = False,
    mean_over: AggregateBy | None = None,
) -> dict[str, Tensor]:
    """The gradient of a plain model that computes in `dtype`, sample by sample."""
    # Which of several ways to multiply with experts is only transformers' choice; another does not take float64.
    plain: Any = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_config(config_of(arch), dtype=dtype, **plain).eval()
    model.load_state_dict(pair(arch).eager.state_dict())
    batch = samples(masked, branched)
    losses: dict[Any, list[Tensor]] = {}  # of what is averaged by itself
    for i in range(len(batch)):
        response = batch["response_tokens"][i]
        if not len(response):
            continue
        parts, part = [], []  # logits, and the sequence that they are of
        for k, (path, places) in enumerate(sequences(batch, i)):
            part += [k] * int((places >= 0).sum())
            logits = model(path[None], use_cache=False).logits[0]
            # Of a sequence that nothing comes before, the first token has no logits; it is masked.
            parts.append(logits[(places >= 0).nonzero()[:, 0] - 1])
        log_p = torch.log_softmax(torch.cat(parts).double() / TEMPERATURE, -1)
        own = batch["response_mask"][i].bool() if masked else torch.ones(len(response), dtype=torch.bool)
        log_p = log_p[own]
        new = log_p.gather(1, response[own, None])[:, 0]
        old, ref, rollout = (batch[f"{policy}_logprobs"][i][own] for policy in ("old", "ref", "rollout"))
        ratio = torch.exp(new - old)
        advantage = batch["advantage"][i]
        gain = torch.minimum(ratio * advantage, ratio.clamp(0.9, 1.1) * advantage)
        gain = torch.maximum(gain, 3 * advantage) if advantage < 0 else gain
        if correction:  # of the policy term only
            ratio = (old.double() - rollout).exp()
            if correction.kind == "sequence":
                gain = gain * ratio.prod().clamp(max=1.5)
            else:
                gain = gain * torch.where((ratio >= 0.5) & (ratio <= 1.5), ratio, 0)
        far = ref - new
        near = far.clamp(max=math.log(21))
        entropy = -(log_p.exp() * log_p).sum(-1)
        per_token = -gain + 0.05 * (near.exp() - 1 - near + 20 * (far - near)) - 0.02 * entropy
        for k, loss in zip(torch.tensor(part)[own].tolist(), per_token, strict=True):
            unit = {None: 0, "sample": i, "branch": (i, k)}[mean_over]
            losses.setdefault(unit, []).append(loss)
    torch.stack([torch.stack(unit).mean() for unit in losses.values()]).mean().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture(scope="module")
def expected() -> Callable[..., dict[str, Tensor]]:
    return cache(by_hand)


def shapes(arch: str) -> dict[str, Any]:
    return {name: p.shape for name, p in source(arch, Path()).skeleton().named_parameters()}


def as_transformers(arch: str, ours: dict[str, Tensor]) -> dict[str, Tensor]:
    shapes = {name: tuple(p.shape) for name, p in pair(arch).eager.named_parameters()}
    return {name: read_stacked(lambda n, part: ours[n][part], name, shape) for name, shape in shapes.items()}


def test_small_layers_are_gathered_together(monkeypatch: pytest.MonkeyPatch) -> None:
    model = AutoModelForCausalLM.from_config(config_of("qwen2", num_hidden_layers=5))
    first, second, third, fourth, fifth = model.model.layers
    for unit, units in (
        (1, [[first], [second], [third], [fourth], [fifth]]),
        (TWO, [[first, second], [third, fourth], [fifth]]),
        (4 * TWO, [[first, second, third, fourth, fifth]]),
        (ALL, []),
    ):
        monkeypatch.setattr(fsdp, "UNIT", unit)
        assert fsdp.units(model) == units


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_gradient_of_any_layout_is_that_of_a_plain_model(
    results: Results, expected: Callable[..., dict[str, Tensor]], case: Case
) -> None:
    workers = results.gradients[case]
    assert len(workers) == len(case.layout.ranks)
    got = as_transformers(case.arch, whole(shapes(case.arch), [parts for parts, _, _ in workers]))
    want = expected(
        case.arch, correction=case.correction, masked=case.masked, branched=case.branched, mean_over=case.mean_over
    )
    assert got.keys() == want.keys()
    for name, grad in want.items():
        assert grad.abs().max() > 0, name
        assert torch.allclose(got[name].double(), grad, rtol=1e-3, atol=1e-5 * float(grad.abs().max())), name
    norm = float(torch.cat([g.flatten() for g in want.values()]).norm())
    assert {round(logged / norm, 4) for _, _, logged in workers} == {1.0}


@pytest.mark.parametrize("case", BFLOAT16, ids=str)
def test_in_bfloat16_only_the_computation_is_inexact(
    results: Results, expected: Callable[..., dict[str, Tensor]], case: Case
) -> None:
    workers = results.gradients[case]
    assert {d for _, dtypes, _ in workers for d in dtypes} == {"torch.float32"}
    joined = whole(shapes(case.arch), [parts for parts, _, _ in workers], rtol=1e-2)
    three = joined, expected(case.arch, correction=None), by_hand(case.arch, torch.bfloat16)
    got, want, plain = (torch.cat([g[n].double().flatten() for n in joined]) for g in three)
    # No less exact than Hugging Face's own, which differs by CPU.
    assert float((got - want).norm() / (plain - want).norm()) < 1.1
    assert not torch.allclose(got, want, rtol=1e-4)


@pytest.mark.parametrize("number", range(len(ARCHITECTURES)))
def test_mini_batches_and_epochs_change_the_weights_alike_in_any_layout(results: Results, number: int) -> None:
    arch = ARCHITECTURES[number]
    alone, four = (
        as_transformers(arch, whole(shapes(arch), [w for w, _ in results.learnt[2 * number + k]])) for k in (0, 1)
    )
    for name, before in pair(arch).eager.named_parameters():
        assert (alone[name] - before).abs().max() > 1e-3, name
        assert torch.allclose(alone[name], four[name], atol=2e-5), name
    by_one = [np.concatenate(rows) for (_, rows) in results.learnt[2 * number]]
    by_four = [np.concatenate(rows) for (_, rows) in results.learnt[2 * number + 1]]
    assert np.allclose(by_one[0], np.concatenate([by_four[0], by_four[2]]), atol=1e-4)
    assert np.array_equal(by_four[0], by_four[1])  # of one tensor-parallel replica


@pytest.mark.parametrize("number", range(len(ARCHITECTURES)))
def test_an_exported_model_gives_the_log_probs_of_the_trainer(
    results: Results, number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arch = ARCHITECTURES[number]
    run, out = results.folder / f"{arch}-run", tmp_path / "out"
    assert exported(run, out) == 0
    loaded: Any = AutoModelForCausalLM.from_pretrained(out, dtype="auto", output_loading_info=True)
    model, info = loaded
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.dtype == torch.float32
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == (arch == "qwen2")
    batch, rows = samples(), [row for _, r in results.learnt[2 * number + 1][::2] for row in r]
    for i in range(len(batch)):
        prompt, response = batch["prompt_tokens"][i], batch["response_tokens"][i]
        with torch.no_grad():
            logits = model(torch.cat((prompt, response))[None]).logits[0, len(prompt) - 1 : -1]
        log_p = torch.log_softmax(logits / TEMPERATURE, -1)[: len(response)]
        assert np.allclose(log_p.gather(1, response[:, None])[:, 0].numpy(), rows[i], atol=1e-4)
    tokenizer = AutoTokenizer.from_pretrained(out)
    theirs = source(arch, results.folder).tokenizer
    assert tokenizer("so it is: 42 ü").input_ids == theirs("so it is: 42 ü").input_ids
    assert (tokenizer.eos_token_id, tokenizer.chat_template) == (theirs.eos_token_id, theirs.chat_template)

    capsys.readouterr()
    assert exported(run, out) == 2
    assert "is not empty; choose another directory" in capsys.readouterr().err
    assert exported(run, tmp_path / "third", "--step", "3") == 0
    assert exported(run, tmp_path / "fourth", "--step", "4") == 2
    assert "has no checkpoint of step 4; there are: 3, 7" in capsys.readouterr().err
    assert exported(run, tmp_path / "fifth", "--adapter") == 2
    assert "'actor' was trained without an adapter; export it without --adapter" in capsys.readouterr().err


def exported(*args: Path | str) -> int:
    with pytest.raises(SystemExit) as e:
        cli.main(["export", *map(str, args)])
    assert isinstance(e.value.code, int)
    return e.value.code
