"""The memory of a worker in each phase of a step, from its own code on tensors without memory."""

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group

from distflow.algo.losses import nll, value
from distflow.batch.batch import Batch, Ragged
from distflow.batch.context import Context
from distflow.config import Config
from distflow.config.model_shape import shape_from
from distflow.device.footprint import CONTEXT, PROMPT, ROLLOUT, Phase
from distflow.model.source import Source
from distflow.observe.metrics import StepMetrics
from distflow.plan import Plan, RunNode, SyncWeights
from distflow.plan.topology import Topology
from distflow.rehearsal.allocations import Allocations
from distflow.rehearsal.world import DEVICE, join, world_of
from distflow.rollout.builtin import continuous_batch
from distflow.rollout.builtin.device_cache import PAGE, DeviceCache
from distflow.rollout.builtin.engine import BuiltinEngine
from distflow.rollout.builtin.weight_buffers import WeightBuffers
from distflow.rollout.engine import Request, SamplingParams
from distflow.rollout.responses import complete
from distflow.run.program import Program
from distflow.run.role_objects import RankContext, make_roles, mesh_shapes
from distflow.train import fsdp, logprobs
from distflow.train.trainer import Trainer
from distflow.train.update_spec import UpdateSpec

PER_HOST = 8
WEIGHT_SYNC = "weight sync"  # the beginning of the name of its phase
_CACHE = "KV cache"
_DEPTHS = (4, 6)  # layers: fewer have other peaks, as the next ones are gathered while one is computed
_Peaks = Mapping[str, Mapping[str, float]]  # what is allocated at a peak → the parts of all memory then
_SKELETON = "skeleton"  # a model's parameters before they are cut, which need no memory


def phases_of_worker(
    program: Program, config: Config, source: Source, plan: Plan, rank: int, whole: bool = False
) -> list[Phase]:
    """Walks the chain of a rank. `config`: the program's, with what was chosen for the device.

    Of a deep model two short ones are walked, as its layers are alike, unless the `whole` one has to be. Any other
    engine is taken to need as much as the built-in one.
    """

    def of_depth(depth: int) -> Config:
        """Returns a config whose cache holds as many tokens as that of the whole model."""
        cache = config.rollout.kv_cache_gb * depth / shape.layers
        rollout = config.rollout.model_copy(update={"engine": "builtin", "kv_cache_gb": cache})
        return config.model_copy(update={"rollout": rollout})

    shape = shape_from(source.config.to_dict(), source.name, "the config of the model")
    # Small layers are gathered some at a time.
    whole = whole or shape.layers <= max(_DEPTHS) or shape.layer_params * 4 < fsdp.UNIT
    depths = [shape.layers] if whole else list(_DEPTHS)
    found = []
    for depth in depths:
        as_written = torch.compiler.set_stance("force_eager")  # tensors without memory cannot be compiled for
        with world_of(plan.workers, rank) as memory, _without_files(), _labels(memory), _quiet(), as_written, memory:
            found.append(
                list(_Walk(program, of_depth(depth), _with_layers(source, depth), plan, rank, memory).phases())
            )
    if len(found) == 1:
        return [_phase(name, peaks) for name, peaks in found[0]]
    steps = (shape.layers - depths[0]) / (depths[1] - depths[0])
    return [
        _phase(name, _extended(less, more, steps)) for (name, less), (_, more) in zip(found[0], found[1], strict=True)
    ]


def _with_layers(source: Source, layers: int) -> Source:
    config = deepcopy(source.config)
    text: Any = config.get_text_config()
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:layers]
    return replace(source, config=config)


def _extended(less: _Peaks, more: _Peaks, steps: float) -> _Peaks:
    """Returns the peaks of a model that is deeper than the first by so many times what the second one is."""
    nothing: Mapping[str, float] = {}
    result = {}
    for label in less.keys() | more.keys():
        a, b = less.get(label, nothing), more.get(label, nothing)
        result[label] = {
            part: a.get(part, 0) + steps * (b.get(part, 0) - a.get(part, 0)) for part in a.keys() | b.keys()
        }
    return result


def _phase(name: str, peaks: _Peaks) -> Phase:
    """Returns a phase with its memory at the highest peak, the largest part first."""
    most = max(peaks.values(), key=lambda parts: sum(parts.values()), default={})
    return Phase(name, dict(sorted(({"context": float(CONTEXT)} | dict(most)).items(), key=lambda part: -part[1])))


class _Walk:
    def __init__(
        self, program: Program, config: Config, source: Source, plan: Plan, rank: int, memory: Allocations
    ) -> None:
        self.program, self.config, self.source, self.plan, self.rank = program, config, source, plan, rank
        self.memory = memory

    def phases(self) -> Iterator[tuple[str, _Peaks]]:
        joined = join(mesh_shapes(self.program, [self.plan]), self.plan, self.rank)
        topology = Topology(tuple(r // PER_HOST for r in range(self.plan.workers)))
        context = RankContext(self.rank, *joined, topology, DEVICE, self.source, None, steps=1000)
        roles: dict[str, Any] = make_roles(self.program, self.config, [self.plan], context, models_only=True)
        yield self._peaks("load")
        trained = {n.role for n in self.plan.flow.nodes if n.type == "train"}
        for name in sorted(trained & roles.keys()):
            with self.memory.label(f"moments of {name}"):
                roles[name].restore({"optimizer_steps": 1, "updates": 1})
        for task in self.plan.chain(self.rank):
            if isinstance(task, SyncWeights):
                policy = roles[task.role].policy
                policy.check = policy.check and SimpleNamespace(agree=_nothing, compare=_nothing)
                with self.memory.label("buckets"):
                    _drive(policy.sync_weights(0))
                yield self._peaks(f"{WEIGHT_SYNC} of {task.role}")
            elif isinstance(task, RunNode):
                node = self.plan.flow.node(task.node)
                role: Any = roles.get(node.role)
                if node.generates and hasattr(role, "policy"):
                    self._roll_out(role.policy)
                    yield self._peaks(ROLLOUT)
                    role.policy.release_engine_memory()
                    self.memory.peaks()
                elif node.type != "compute" and (trainer := _trainer(role)):
                    train = node.type == "train"
                    self._update(trainer) if train else self._infer(trainer)
                    yield self._peaks(f"{'update' if train else 'log-probs'} of {node.role}")
        for name in sorted(trained & roles.keys()):
            if state := roles[name].state():
                yield self._peaks(f"checkpoint of {name}")
            del state

    def _peaks(self, name: str) -> tuple[str, _Peaks]:
        peaks = {label: dict(parts) for label, parts in self.memory.peaks().items()}
        for parts in (p for p in peaks.values() if _CACHE in p):
            parts[_CACHE] = int(self.config.rollout.kv_cache_gb * (1 << 30))  # an engine may take all that it is given
        return name, peaks

    def _lengths(self) -> tuple[int, int]:
        """Returns the tokens of a prompt and of a response."""
        config = self.config
        return min(PROMPT, config.data.max_prompt or PROMPT), config.rollout.max_tokens

    def _batch(self, trainer: Trainer) -> Batch:
        return full_batch(trainer.config.micro_tokens * trainer.layout.sp, *self._lengths())

    def _infer(self, trainer: Trainer) -> None:
        with self.memory.label("activations"):
            trainer.infer(self._batch(trainer))

    def _update(self, trainer: Trainer) -> None:
        batch = self._batch(trainer)
        spec = UpdateSpec(nll if trainer.source.head == "lm" else value, {}, "token-mean", 1, 1000)
        context = Context(1, self.rank, self.plan.workers, trainer.layout, 0, StepMetrics(), Path(), batch.groups)
        with self.memory.label("activations and gradients"):
            trainer.update(batch, spec, context)

    def _roll_out(self, policy: Any) -> None:
        """Prefills as many prompts as are generated at once, and decodes a token of each."""
        prompt, response = self._lengths()
        engine, repeat = policy.engine, self.config.rollout.n
        replicas, length = engine.setup.layout.dp, prompt + 2
        room = engine.limits.pages(PAGE, length) // -(-length // PAGE)  # others would have to wait for these
        count = min(self.config.rollout.max_sequences, room, max(1, self.plan.samples // replicas))
        params = SamplingParams(2, policy.sampling.temperature, policy.sampling.top_p, policy.sampling.top_k)
        texts = [(i // repeat % 200, *range(prompt - 1)) for i in range(count)]
        requests = [Request(i, text, params, 0) for i, text in enumerate(texts)]
        with self.memory.label("activations"), engine.serving(count, prompt + response):
            complete(engine, requests)


def full_batch(tokens: int, prompt: int, response: int) -> Batch:
    """Returns two micro-batches of samples of this length: gradients of the first one are there in the second."""
    count = 2 * max(1, tokens // (prompt + response - 1))
    ids = np.arange(count)

    def column(lengths: int, dtype: torch.dtype) -> Ragged:
        return Ragged.packed(torch.zeros(count * lengths, dtype=dtype), np.full(count, lengths))

    prompts = Ragged.packed(torch.arange(count * prompt), np.full(count, prompt))  # each is another one
    columns = {"prompt_tokens": prompts, "response_tokens": column(response, torch.int64)}
    return Batch(ids, ids, {**columns, "returns": column(response, torch.float32)})


def _trainer(role: Any) -> Trainer | None:
    trainer = getattr(role, "trainer", None) or getattr(getattr(role, "scorer", None), "trainer", None)
    return trainer if isinstance(trainer, Trainer) else None


def _nothing(*_: Any) -> Iterable[Any]:
    return ()


def _drive(communication: Iterable[Any]) -> None:
    """Runs a rank's part of a communication, which transfers nothing."""
    for request in communication:
        out = torch.empty(request.size, dtype=torch.uint8, device=DEVICE)
        if request.size:
            request.pack(out)
        if request.take:
            for peer, (start, end) in request.receive.items():
                request.take(peer, request.out[start:end])


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps what roles log to themselves: their model may be a shortened one."""
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


@contextmanager
def _without_files() -> Iterator[None]:
    """Gives models no weights, and their buffers no memory."""
    skeleton = Source.skeleton

    def on_device(source: Source) -> Any:
        return skeleton(source)._apply(lambda t: t if t.is_meta else t.to(DEVICE))

    def read(name: str, part: Any) -> Tensor:
        return torch.zeros(()).expand([s.stop - s.start for s in part])

    with patch.object(Source, "skeleton", on_device), patch.object(Source, "reader", lambda source, shapes: read):
        yield


@contextmanager
def _labels(memory: Allocations) -> Iterator[None]:
    """Labels allocations by the function that makes them."""
    head: Any = logprobs._Head
    fsdp_group: Any = _fsdp_param_group
    functions: list[tuple[Any, str, str]] = [
        (WeightBuffers, "allocate", "weights of the engine"),
        (DeviceCache, "layer", _CACHE),
        (continuous_batch, "sample", "sampling"),
        (logprobs, "_logits", "logits"),
        (logprobs, "_gradient", "logits"),
        (fsdp_group, "foreach_all_gather", "gathered weights"),
        (fsdp_group, "foreach_all_gather_copy_out", "gathered weights"),
        (fsdp_group, "foreach_reduce", "gradients to be summed"),
        (_fsdp_param.FSDPParam, "init_all_gather_outputs", "gathered weights"),
        (_fsdp_param.FSDPParam, "alloc_all_gather_outputs", "gathered weights"),
    ]
    initialize, materialize, make_engine = Trainer.__init__, Trainer._materialize, BuiltinEngine.__init__

    def trainer(self: Trainer, *args: Any, **kwargs: Any) -> None:
        with memory.label(_SKELETON):
            initialize(self, *args, **kwargs)

    def weights(self: Trainer, rank: int) -> None:
        memory.drop(_SKELETON)
        memory.relabel(f"weights of {self.name}")  # and of what follows, such as their average
        materialize(self, rank)

    def engine(self: BuiltinEngine, *args: Any) -> None:
        with memory.label(_SKELETON):
            make_engine(self, *args)
        memory.drop(_SKELETON)

    with ExitStack() as stack:
        for owner, name, label in functions:
            stack.enter_context(patch.object(owner, name, memory.labelled(label, getattr(owner, name))))
        backward = staticmethod(memory.labelled("gradient of the output layer", head.backward))
        stack.enter_context(patch.object(head, "backward", backward))
        for owner, name, function in (
            (Trainer, "__init__", trainer),
            (Trainer, "_materialize", weights),
            (BuiltinEngine, "__init__", engine),
        ):
            stack.enter_context(patch.object(owner, name, function))
        yield
