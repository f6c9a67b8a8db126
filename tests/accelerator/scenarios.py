"""What the tests of the rehearsal do with the engine on a worker, as functions of the device."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.device_mesh import DeviceMesh

from accelerator.rehearsal_device import WAIT, calls
from accelerator.rehearse import DEVICE, REHEARSED
from cases import Source as Rows
from distflow.algo.correction import Correction
from distflow.algo.losses import policy, value
from distflow.batch.batch import Batch, Ragged
from distflow.batch.context import Context
from distflow.checkpoint.store import load_tensors
from distflow.checkpoint.writer import CheckpointWriter, _copy
from distflow.comm import transport
from distflow.comm.transport import Transport
from distflow.config.schema import Dtype, LoraConfig, Offload, RolloutConfig, TrainConfig
from distflow.coordinator.coordinator import Coordinator
from distflow.dataset.loader import Loader
from distflow.flow import Flow, Node
from distflow.model.source import DTYPES, Source
from distflow.model.tokenizer import train_tokenizer
from distflow.observe.metrics import StepMetrics
from distflow.plan import Layout, Place, Placement, Workload, plan
from distflow.plan.topology import Topology
from distflow.rollout.builtin import continuous_batch
from distflow.rollout.builtin.engine import BuiltinEngine
from distflow.rollout.builtin.weight_buffers import empty_weights
from distflow.rollout.engine import EngineSetup, Request, SamplingParams
from distflow.rollout.responses import complete
from distflow.rollout.sampling import sample
from distflow.run.comm import Comm
from distflow.run.versions import Versions
from distflow.run.worker import Worker
from distflow.run_folder import checkpoint_dir
from distflow.train import fsdp
from distflow.train.trainer import RankMesh, Trainer, TrainerOptions
from distflow.train.update_spec import UpdateSpec
from distflow.weights.shards import Shards, slices
from distflow.weights.sync import WeightSync
from spawn import make_transport
from tiny import VOCABULARY, config_of, pair

DEVICES = (DEVICE, "cpu")


@dataclass(frozen=True)
class Case:
    """How a model is trained or generates."""

    arch: str = "qwen3"
    dp: int = 1
    tp: int = 1
    dtype: Dtype = "float32"
    gradient_checkpointing: bool = False
    lora: bool = False
    values: bool = False
    offload: Offload = "none"
    offload_activations: bool = False

    @property
    def layout(self) -> Layout:
        return Layout(tuple(range(self.dp * self.tp)), self.dp, self.tp)

    def mesh(self, device: str) -> DeviceMesh:
        ranks = torch.tensor(self.layout.ranks).view(self.dp, self.tp)
        return DeviceMesh(device, ranks, mesh_dim_names=("dp", "tp"))

    @property
    def source(self) -> Source:
        source = Source(self.arch, config_of(self.arch), train_tokenizer(iter(["some text"]), 0))
        return source.with_value_head() if self.values else source


def samples() -> Batch:
    """Returns samples of different lengths, two per prompt, one without a response."""
    rng = np.random.default_rng(3)
    prompts, responses = np.repeat(rng.integers(1, 9, 5), 2), rng.integers(1, 12, 10)
    responses[4] = 0
    texts = [torch.from_numpy(rng.integers(0, VOCABULARY, n)) for n in prompts[::2]]

    def logprobs() -> Ragged:
        return Ragged.of([torch.from_numpy(-4 - rng.random(n, np.float32)) for n in responses])

    return Batch(
        np.arange(10),
        np.arange(10) // 2,
        {
            "prompt_tokens": Ragged.of([t for t in texts for _ in range(2)]),
            "response_tokens": Ragged.of([torch.from_numpy(rng.integers(0, VOCABULARY, n)) for n in responses]),
            "old_logprobs": logprobs(),
            "ref_logprobs": logprobs(),
            "rollout_logprobs": logprobs(),
            "returns": logprobs(),
            "advantage": torch.from_numpy(rng.normal(size=10).astype(np.float32)),
        },
    )


def share(rank: int, case: Case) -> Batch:
    return samples() if case.dp == 1 else samples().select(np.arange(6) if rank < case.tp else np.arange(6, 10))


def make_trainer(rank: int, case: Case, device: str) -> Trainer:
    keys: Any = {key: getattr(case, key) for key in ("gradient_checkpointing", "offload", "offload_activations")}
    config = TrainConfig(lr=1e-2, micro_tokens=24, dtype=case.dtype, **keys)
    lora = LoraConfig(rank=2) if case.lora else None
    place, options = RankMesh(case.layout, case.mesh(device), rank), TrainerOptions(config, lora=lora, temperature=0.8)
    with patch.object(fsdp, "UNIT", 1):  # every layer is gathered by itself
        return Trainer("actor", case.source, place, options)


def update(trainer: Trainer, rank: int, case: Case, steps: int = 2) -> dict[str, float]:
    """Makes optimiser steps and returns the metrics."""
    constants: dict[str, Any] = {"clip": 0.1, "kl": 0.05, "entropy": 0.02}
    spec = UpdateSpec(policy, constants, "token-mean", 12, 10, mini_batches=steps, correction=Correction("token"))
    if case.values:
        spec = UpdateSpec(value, {}, "token-mean", 12, 10, mini_batches=steps)
    metrics = StepMetrics()
    context = Context(0, rank, case.dp * case.tp, case.layout, 0, metrics, Path(), np.arange(5))
    trainer.update(share(rank, case), spec, context)
    return {name: total for (name, _), (total, _) in metrics.totals.items()}


def resident(trainer: Trainer) -> int:
    """Returns the bytes of weights and moments that the device holds between uses: what was freed reads as NaN."""
    assert trainer.optimizer is not None
    moments = [state[key] for state in trainer.optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    shards = [fsdp.local(p.detach()) for _, p in trainer.base]
    return sum(t.nbytes for t in (*moments, *shards) if not t.is_cpu and not bool(t.isnan().all()))


def infer(trainer: Trainer, rank: int, case: Case) -> NDArray[np.float32]:
    result: NDArray[np.float32] = trainer.infer(share(rank, case)).values.numpy()
    return result


def train(rank: int, case: Case, devices: tuple[str, ...] = DEVICES) -> list[tuple[dict[str, float], Any]]:
    """Returns, for each device, the metrics of two updates and the trained model's log-probs or values."""
    results = []
    for device in devices:
        trainer = make_trainer(rank, case, device)
        metrics = update(trainer, rank, case)
        if not case.values:
            assert {t.device.type for t in dict(trainer.weights()).values()} == {device}
        results.append((metrics, infer(trainer, rank, case)))
    return results


def save_and_restore(rank: int, case: Case, folder: str) -> list[Any]:
    """Returns the log-probs of a trainer that continues, and of another one that continues from its checkpoint."""
    trainer = make_trainer(rank, case, DEVICE)
    update(trainer, rank, case)
    ranks, state = case.layout.ranks, trainer.state()
    writer = CheckpointWriter(Path(folder), rank, ranks, {"actor": ranks}, make_transport(rank, len(ranks)).run)
    copied = _copy("actor", state, ranks.index(rank)).tensors
    assert {t.device.type for t in copied.values()} == {"cpu"}  # a device has no room for two
    writer.save(1, writer.copy({"actor": state}), {}, lambda path: None)
    writer.wait()
    writer.close()
    restored = make_trainer(rank, case, DEVICE)
    restored.restore(state.values)
    load_tensors(checkpoint_dir(Path(folder), 1) / "actor", restored.state(), rank)
    for each in (trainer, restored):
        update(each, rank, case)
    return [infer(each, rank, case) for each in (trainer, restored)]


PROMPTS = [tuple(np.random.default_rng(n).integers(0, VOCABULARY, n).tolist()) for n in (3, 12, 1, 5, 5, 21)]
PROMPT_OF = [1, 0, 5, 1, 2, 3, 1, 4, 5, 0]
_PARAMS = SamplingParams(max_tokens=6, temperature=1.3, stop=frozenset({2, 3, 4, 5, 6, 7}))
PARAMS = {
    "plain": _PARAMS,
    "greedy": replace(_PARAMS, temperature=0.0),
    "top-p and top-k": replace(_PARAMS, top_p=0.8, top_k=20),
    "min tokens": replace(_PARAMS, min_tokens=4),
}


@dataclass(frozen=True)
class Generated:
    tokens: list[list[int]]
    logprobs: NDArray[np.float32]
    waits: float  # of the host for the device, per forward pass


def make_engine(rank: int, case: Case, device: str, slots: int = 4, graphs: bool = True) -> BuiltinEngine:
    """Makes an engine with so few slots that some samples have to wait."""
    config = RolloutConfig(max_sequences=slots, kv_cache_gb=0.001, graphs=graphs)
    dtype, where = DTYPES[case.dtype], (case.layout, case.mesh(device), rank)
    return BuiltinEngine(EngineSetup(case.source, *where, config, dtype, torch.device(device), 64))


def fill_weights(engine: BuiltinEngine, rank: int, case: Case) -> None:
    weights, shards = pair(case.arch).eager.state_dict(), engine.weights.shards
    targets = engine.weight_targets()
    for spec in engine.weights.specs:
        targets[spec.name].copy_(weights[spec.name][slices(shards.box(spec, rank))])
    engine.commit_weights(engine.weight_version + 1)


def generate(engine: BuiltinEngine, params: SamplingParams) -> Generated:
    """Generates a response to each prompt, and a second one that goes on behind it in the pages of the first."""
    requests = [Request(100 + i, PROMPTS[p], params, seed=11, keep=True) for i, p in enumerate(PROMPT_OF)]
    before = calls[WAIT]
    with patch.object(continuous_batch, "sample", wraps=sample) as sampled, engine.serving(len(requests), 64):
        first = complete(engine, requests)
        second = complete(engine, [_continued(r, first[r.sample_id].tokens.tolist()) for r in requests])
    assert all(c.reused for c in second.values())
    waits = (calls[WAIT] - before) / sampled.call_count
    ordered = [completions[r.sample_id] for completions in (first, second) for r in requests]
    return Generated([c.tokens.tolist() for c in ordered], np.concatenate([c.logprobs for c in ordered]), waits)


def _continued(request: Request, tokens: list[int]) -> Request:
    return replace(request, prompt=(*request.prompt, *tokens, 8, 9), position=len(tokens) + 2, max_tokens=4)


def roll_out(
    rank: int, case: Case, names: Iterable[str] = ("plain",), devices: tuple[str, ...] = DEVICES
) -> dict[str, list[Generated]]:
    """Returns what each device generates with PARAMS of these names; memory is released in between."""
    results: dict[str, list[Generated]] = {name: [] for name in names}
    for device in devices:
        engine = make_engine(rank, case, device)
        for name, generated in results.items():
            fill_weights(engine, rank, case)
            generated.append(generate(engine, PARAMS[name]))
            engine.release_memory(weights=True)
    return results


def local_transport() -> Transport:
    transport: Transport = make_transport(dist.get_rank(), 2, DEVICE)
    return transport


def sync_weights(rank: int) -> None:
    """Moves weights from FSDP shards to tensor-parallel shards, in both precisions, and checks them."""
    case = Case(dp=2)
    trainer = make_trainer(rank, case, DEVICE)
    read = case.source.reader({s.name: s.shape for s in trainer.specs})
    source, target = Shards(case.layout, case.dp), Shards(Case(tp=2).layout, 1)
    boxes = {s.name: target.box(s, rank) for s in trainer.specs}
    shapes = {name: tuple(hi - lo for lo, hi in box) for name, box in boxes.items()}
    communication = local_transport()
    for dtype in (torch.float32, torch.bfloat16):
        filled = empty_weights(shapes, (), dtype, torch.device(DEVICE))
        transfer = WeightSync(trainer.specs, source, target, rank, dtype, Topology.single(2), torch.device(DEVICE))
        before = calls["c10d::send"]
        communication.run(_generator(transfer.run(trainer.weights(), filled)))
        assert calls["c10d::send"] > before or not REHEARSED, "the weights went through host memory"
        for name, box in boxes.items():
            assert torch.equal(filled[name].cpu(), read(name, slices(box)).to(dtype))


def _generator(collectives: Any) -> Any:
    yield from collectives


def _write(batch: Batch) -> Mapping[str, Any]:
    """A node that computes on the device."""
    rows = [torch.arange(int(i) % 5, device=DEVICE) for i in batch.ids]
    return {"rows": rows, "number": torch.tensor(batch.ids, device=DEVICE).float()}


def _read(batch: Batch) -> None:
    assert batch["number"].is_cpu
    assert (batch["number"].numpy() == batch.ids).all()
    assert [len(row.numpy()) for row in batch["rows"]] == [i % 5 for i in batch.ids.tolist()]


def exchange(rank: int, shared_memory: str) -> None:
    """Moves what a node wrote on the device to a node that reads it in host memory."""
    nodes = Node("write", writes=("rows", "number"), fn=_write), Node("read", reads=("rows", "number"), fn=_read)
    placement = Placement(2, {"last": "1"}, nodes={"read": Place("last")})
    moving = plan(Flow("exchange", (), nodes), placement, Workload(prompts=8))
    with patch.dict("os.environ", {transport.SHARED_MEMORY: shared_memory}):
        communication = local_transport()
    data = Coordinator(rank, moving, Loader(Rows(), 8, 1, seed=0))
    worker = Worker(data, Comm(rank, moving, {}, Versions(last=2)))
    communication.run(worker.steps(lambda *_: None))
    data.close()
