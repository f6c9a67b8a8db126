"""The built-in engine behind the interface of rollout engines: weights in, requests in, completions out."""

import gc
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.multiprocessing.reductions import StorageWeakRef

from distflow.config.schema import RolloutConfig
from distflow.model.source import Source
from distflow.model.tokenizer import train_tokenizer
from distflow.plan.layout import Layout
from distflow.rollout.builtin.engine import BuiltinEngine
from distflow.rollout.engine import EngineSetup, RolloutEngine
from distflow.rollout.responses import complete
from rollout.plain_loop import IDS, as_response, expected, passes, requests_for, same
from tiny import config_of, pair


@cache
def source(arch: str) -> Source:
    return Source(arch, config_of(arch), train_tokenizer(iter(["a text"]), 0))


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """A process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield DeviceMesh("cpu", torch.tensor([[0]]), mesh_dim_names=("dp", "tp"))
    dist.destroy_process_group()


def make_engine(mesh: DeviceMesh, arch: str = "qwen2", **config: float) -> RolloutEngine:
    """The return type is the protocol: mypy checks that the engine satisfies it."""
    rollout = RolloutConfig.model_validate({"kv_cache_gb": 0.01, "max_sequences": 8, **config})
    where = Layout((0,), 1), mesh, 0
    return BuiltinEngine(EngineSetup(source(arch), *where, rollout, torch.float32, torch.device("cpu"), 64))


def fill(targets: Mapping[str, Tensor], arch: str = "qwen2") -> None:
    weights = dict(pair(arch).ours.named_parameters())
    assert targets.keys() == weights.keys()
    for name, target in targets.items():
        assert target.shape == weights[name].shape
        target.copy_(weights[name])


@pytest.mark.parametrize("arch", ["qwen2", "llama", "gemma2"])
@pytest.mark.usefixtures("backend")
def test_it_generates_with_the_weights_that_were_filled_in(mesh: DeviceMesh, arch: str) -> None:
    engine = make_engine(mesh, arch)
    fill(engine.weight_targets(), arch)
    engine.commit_weights(0)
    completions = complete(engine, requests_for())
    assert same([as_response(completions[i]) for i in IDS], expected(arch))


def test_a_completion_names_the_version_of_its_weights(mesh: DeviceMesh) -> None:
    engine = make_engine(mesh)
    assert engine.weight_version == -1
    for version in (0, 1, 5):
        fill(engine.weight_targets())
        engine.commit_weights(version)
        assert engine.weight_version == version
        completions = complete(engine, requests_for([0, 1]))
        assert {c.weight_version for c in completions.values()} == {version}


def test_weights_are_not_replaced_while_requests_are_unfinished(mesh: DeviceMesh) -> None:
    engine = make_engine(mesh)
    fill(engine.weight_targets())
    engine.commit_weights(0)
    for request in requests_for():
        engine.add_request(request)
    with pytest.raises(AssertionError):
        engine.commit_weights(1)
    assert 0 < len(engine.step()) < len(IDS)
    with pytest.raises(AssertionError):
        engine.commit_weights(1)
    while engine.has_unfinished:
        engine.step()
    engine.commit_weights(1)


@pytest.mark.usefixtures("backend")
def test_it_can_share_the_tensors_of_a_trainer(mesh: DeviceMesh) -> None:
    """An update of them is seen at once, and they are the same to the bit after generation."""
    engine = make_engine(mesh)
    tensors = {name: torch.zeros_like(p) for name, p in pair("qwen2").ours.named_parameters()}
    assert not engine.share_weights({name: t.bfloat16() for name, t in tensors.items()})  # it computes in float32
    assert engine.share_weights(tensors)
    engine.commit_weights(0)
    fill(tensors)
    before = {name: t.clone() for name, t in tensors.items()}
    completions = complete(engine, requests_for())
    assert same([as_response(completions[i]) for i in IDS], expected("qwen2"))
    assert all(torch.equal(t, before[name]) for name, t in tensors.items())


def test_it_can_read_its_weights_where_nobody_trains_them(mesh: DeviceMesh, tmp_path: Path) -> None:
    pair("qwen2").eager.save_pretrained(tmp_path)
    engine = make_engine(mesh)
    engine.read_weights(replace(source("qwen2"), folder=tmp_path))
    engine.commit_weights(0)
    completions = complete(engine, requests_for())
    assert same([as_response(completions[i]) for i in IDS], expected("qwen2"))


def test_its_specs_name_the_weights_to_fill(mesh: DeviceMesh) -> None:
    engine = make_engine(mesh)
    shapes = {spec.name: spec.shape for spec in engine.weight_specs}
    assert shapes == {name: tuple(t.shape) for name, t in engine.weight_targets().items()}


def test_an_engine_without_requests_has_nothing_to_do(mesh: DeviceMesh) -> None:
    engine = make_engine(mesh)
    fill(engine.weight_targets())
    engine.commit_weights(0)
    assert not engine.has_unfinished
    assert engine.step() == []
    assert complete(engine, []) == {}


@pytest.mark.usefixtures("backend")
def test_weights_are_the_same_to_the_bit_after_generation(mesh: DeviceMesh) -> None:
    engine = make_engine(mesh)
    targets = engine.weight_targets()
    fill(targets)
    engine.commit_weights(0)
    complete(engine, requests_for())
    weights = dict(pair("qwen2").ours.named_parameters())
    assert all(torch.equal(t, weights[name]) for name, t in targets.items())


@pytest.mark.usefixtures("backend")
def test_released_memory_is_freed_and_allocated_again_for_the_next_weights(mesh: DeviceMesh) -> None:
    engine = make_engine(mesh)
    for version in range(2):
        targets = engine.weight_targets()
        fill(targets)
        engine.commit_weights(version)
        completions = complete(engine, requests_for())
        assert same([as_response(completions[i]) for i in IDS], expected("qwen2"))
        storages = [StorageWeakRef(t.untyped_storage()) for t in targets.values()]
        del targets
        engine.release_memory(weights=True)
        gc.collect()
        assert all(storage.expired() for storage in storages)


def test_the_config_limits_the_sequences_that_run_at_once(mesh: DeviceMesh) -> None:
    engine = make_engine(mesh, max_sequences=3)
    assert isinstance(engine, BuiltinEngine)
    fill(engine.weight_targets())
    engine.commit_weights(0)
    with passes() as computed:
        complete(engine, requests_for())
    assert max(computed["Decode"]) == 3
