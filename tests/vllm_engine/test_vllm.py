"""vLLM behind the interface of rollout engines: the tokens of a plain loop, with the weights that were filled in.

`make test-vllm` runs this, in an environment of its own.
"""

import os
import random
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import tiny
from distflow.config.schema import LoraConfig, RolloutConfig, VllmConfig
from distflow.errors import ConfigError, WeightsError
from distflow.model.source import Source
from distflow.model.tokenizer import train_tokenizer
from distflow.plan.layout import Layout
from distflow.plan.topology import Topology
from distflow.rollout.engine import Completion, EngineSetup, Request, RolloutEngine, SamplingParams
from distflow.rollout.responses import complete
from distflow.rollout.sampling import sample
from distflow.rollout.vllm import engine as vllm_engine
from distflow.rollout.vllm import sampler
from distflow.rollout.vllm.engine import VllmEngine, config_folder
from distflow.rollout.vllm.start import start_vllm
from distflow.weights.shards import Shards, slices
from distflow.weights.sync import WeightSync
from distflow.weights.verify import WeightCheck
from rollout.plain_loop import IDS, PARAMS, as_response, expected, plain_loop, requests_for, same
from spawn import make_transport, spawn
from tiny import config_of, pair

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here: `make test-vllm`", allow_module_level=True)

tiny._BASE.update(hidden_size=128, head_dim=32)  # vLLM for CPU knows no smaller heads
ALONE = Layout((0,), 1)
CPU = torch.device("cpu")
CONFIG = RolloutConfig(engine="vllm", kv_cache_gb=0.05, max_sequences=8)


@cache
def source(arch: str) -> Source:
    return Source(arch, config_of(arch), train_tokenizer(iter(["a text"]), 0))


def make_engine(
    arch: str = "qwen2",
    layout: Layout = ALONE,
    lora: LoraConfig | None = None,
    config: RolloutConfig = CONFIG,
    dtype: torch.dtype = torch.float32,
) -> VllmEngine:
    mesh = DeviceMesh("cpu", torch.tensor(layout.ranks).view(layout.dp, layout.tp), mesh_dim_names=("dp", "tp"))
    return VllmEngine(EngineSetup(source(arch), layout, mesh, dist.get_rank(), config, dtype, CPU, 64, lora))


def weights(arch: str) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in pair(arch).ours.named_parameters()}


def fill(engine: RolloutEngine, tensors: Mapping[str, Tensor], version: int = 0) -> None:
    targets = engine.weight_targets()
    for name, tensor in tensors.items():
        targets[name].copy_(tensor)
    engine.commit_weights(version)


# Each of these starts vLLM in a process of its own, where several things are looked at: it takes seconds.


def as_the_plain_loop(rank: int, arch: str) -> None:
    engine = make_engine(arch)
    assert {s.name: s.shape for s in engine.weight_specs} == {n: tuple(p.shape) for n, p in weights(arch).items()}
    fill(engine, weights(arch))
    completions = complete(engine, requests_for())
    assert same([as_response(completions[i]) for i in IDS], expected(arch))


@pytest.mark.parametrize("arch", ["llama", "mistral", "qwen3"])
def test_it_generates_with_the_weights_that_were_filled_in(arch: str) -> None:
    spawn(1, as_the_plain_loop, arch)


def everything_about_one_engine(rank: int) -> None:
    before = _process_state()
    engine = make_engine()
    _is_unchanged(before, _process_state())
    _weights_are_seen(engine)
    _sampling_parameters_are_kept(engine)
    _completions_come_as_they_finish(engine)
    _turns_of_conversations_come_and_go(engine)
    _what_is_interrupted_is_carried_on(engine)
    _a_prefix_is_not_kept_over_an_update(engine)
    assert _process_state()["threads"] == before["threads"]


def test_an_engine_does_what_the_interface_says() -> None:
    spawn(1, everything_about_one_engine)


def _process_state() -> dict[str, Any]:
    return {
        "environment": {k: v for k, v in os.environ.items() if not k.startswith("VLLM_")},
        "set_num_threads": torch.set_num_threads,
        "threads": torch.get_num_threads(),
        "affinity": os.sched_getaffinity(0),
        "dtype": torch.get_default_dtype(),
        "python": random.getstate(),
        "numpy": np.random.get_state()[1].tolist(),  # type: ignore[index]
        "torch": torch.get_rng_state().tolist(),
    }


def _is_unchanged(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert [key for key in before if before[key] != after[key]] == []


def _weights_are_seen(engine: RolloutEngine) -> None:
    """An update in place is used by the next request, as is the next."""
    assert engine.weight_version == -1
    changed = {name: t * 0.9 for name, t in weights("qwen2").items()}
    for version, tensors in enumerate((weights("qwen2"), changed, weights("qwen2"))):
        fill(engine, tensors, version)
        held = engine.held_weights()
        assert all(torch.equal(held[name], t) for name, t in tensors.items())
        completions = complete(engine, requests_for())
        assert {c.weight_version for c in completions.values()} == {version}
        is_expected = same([as_response(completions[i]) for i in IDS], expected("qwen2"))
        assert is_expected == (version != 1)


def _turns_of_conversations_come_and_go(engine: RolloutEngine) -> None:
    """Two requests of one sample, one that is aborted, one that comes while the others decode."""
    params = replace(PARAMS, stop=frozenset(), max_tokens=40)
    first, branch, dropped, late = (
        replace(request, params=params, position=p, max_tokens=6, request_id=100 + p, sample_id=IDS[0])
        for p, request in zip((0, 6, 12, 18), requests_for([0, 1, 2, 3]), strict=True)
    )
    with engine.serving(4, 64):
        for request in (first, branch, dropped):
            engine.add_request(request)
        assert engine.step(lambda: True) == []
        engine.abort([dropped.id, 7])
        engine.forget([7])
        engine.add_request(late)
        finished: dict[int, Completion] = {}
        while engine.has_unfinished:
            finished |= {c.request_id: c for c in engine.step(lambda: False)}
    assert finished.keys() == {first.id, branch.id, late.id}
    for request in (first, branch, late):
        alone = replace(request, params=replace(params, max_tokens=request.position + 6))
        assert same([as_response(finished[request.id])], [plain_loop("qwen2", alone)])


def _what_is_interrupted_is_carried_on(engine: RolloutEngine) -> None:
    """Some responses are complete when others are interrupted, which go on from there with the same tokens."""
    params = replace(PARAMS, stop=frozenset(), max_tokens=12)
    whole = [replace(r, params=params) for r in requests_for([0, 1, 2, 3])]
    for request in (replace(whole[0], max_tokens=5), *whole[1:]):
        engine.add_request(request)
    assert [len(c.tokens) for c in engine.step()] == [5]
    begun = {c.sample_id: c for c in engine.interrupt()}
    assert begun.keys() == {r.sample_id for r in whole[1:]}
    assert {len(c.tokens) for c in begun.values()} == {5}  # they are in step
    assert not engine.has_unfinished
    assert engine.interrupt() == []
    rest = [
        replace(r, prompt=(*r.prompt, *begun[r.sample_id].tokens.tolist()), position=len(begun[r.sample_id].tokens))
        for r in whole[1:]
    ]
    ended = complete(engine, rest)
    for request in whole[1:]:
        first, last = begun[request.sample_id], ended[request.sample_id]
        joined = replace(
            last,
            tokens=np.concatenate((first.tokens, last.tokens)),
            logprobs=np.concatenate((first.logprobs, last.logprobs)),
        )
        assert same([as_response(joined)], [plain_loop("qwen2", request)])


def _sampling_parameters_are_kept(engine: RolloutEngine) -> None:
    for params in (
        replace(PARAMS, temperature=0.0),
        replace(PARAMS, top_p=0.8),
        replace(PARAMS, top_k=5, min_tokens=4),
        replace(PARAMS, min_p=0.1, repetition_penalty=1.8),
    ):
        completions = complete(engine, requests_for(params=params))
        assert same([as_response(completions[i]) for i in IDS], expected("qwen2", params=params)), params
    whole = as_response(complete(engine, requests_for([0]))[IDS[0]])
    begun = Request(IDS[0], requests_for([0])[0].prompt + tuple(whole[0][:2]), PARAMS, requests_for([0])[0].seed, 2)
    rest = as_response(complete(engine, [begun])[IDS[0]])
    assert same([rest], [plain_loop("qwen2", begun)])
    assert whole[0] == [*whole[0][:2], *rest[0]]


def _completions_come_as_they_finish(engine: RolloutEngine) -> None:
    short, long = SamplingParams(2), SamplingParams(20)
    prompt = requests_for([0])[0].prompt
    engine.add_request(Request(1, prompt, long, 0))
    engine.add_request(Request(2, prompt, short, 0))
    first = engine.step()
    assert [c.sample_id for c in first] == [2]
    with pytest.raises(AssertionError):
        engine.commit_weights(9)
    engine.add_request(Request(3, prompt, short, 0))  # joins while another is unfinished
    order: list[Completion] = []
    while engine.has_unfinished:
        order += engine.step()
    assert [c.sample_id for c in order] == [3, 1]
    assert not any(c.finished for c in [*first, *order])
    assert engine.step() == []


def _a_prefix_is_not_kept_over_an_update(engine: RolloutEngine) -> None:
    """A prompt of several blocks of the cache is read again after an update."""
    prompt = tuple(int(i) % 60 for i in range(50))
    request = Request(7, prompt, SamplingParams(8), 3)
    for arch_scale in (1.0, 0.9):
        tensors = {name: t * arch_scale for name, t in weights("qwen2").items()}
        fill(engine, tensors, 5)
        alone = complete(engine, [request])[7]
        again = complete(engine, [replace(request, sample_id=8)])[8]
        assert (alone.reused, again.reused) == (0, 32)  # a block of the prompt's keys and values is in the cache
        logits = _logits(tensors, [*prompt, *alone.tokens.tolist()])[len(prompt) - 1 : -1]
        wanted = logits.log_softmax(-1).gather(1, torch.from_numpy(alone.tokens)[:, None])[:, 0]
        assert alone.logprobs.tolist() == pytest.approx(wanted.tolist(), abs=1e-4)
        logits = _logits(tensors, [*prompt, *again.tokens.tolist()])[len(prompt) - 1 : -1]
        wanted = logits.log_softmax(-1).gather(1, torch.from_numpy(again.tokens)[:, None])[:, 0]
        assert again.logprobs.tolist() == pytest.approx(wanted.tolist(), abs=1e-4)


def _logits(tensors: Mapping[str, Tensor], tokens: list[int]) -> Tensor:
    with torch.no_grad():
        model = pair("qwen2").eager
        out = torch.func.functional_call(model, dict(tensors), kwargs={"input_ids": torch.tensor([tokens])})
    return out.logits[0]


def with_its_own_sampler(rank: int, layout: Layout) -> list[list[int]]:
    """Its log-probs are those of the weights, its noise has a state of its own, and it schedules ahead."""
    vllm = VllmConfig(sampler="vllm", args={"max_num_batched_tokens": 48})
    config = CONFIG.model_copy(update={"vllm": vllm, "temperature": PARAMS.temperature})
    VllmEngine.check(source("qwen2"), config, CPU, None)
    with patch.object(vllm_engine, "start_vllm", wraps=start_vllm) as started:
        engine = make_engine("qwen2", layout, config=config)
    assert started.call_args.args[-1]["async_scheduling"]  # which vLLM for CPU switches off
    assert engine.engine.vllm_config.scheduler_config.max_num_batched_tokens == 48
    originals = weights("qwen2")
    params, before = replace(PARAMS, stop=frozenset()), torch.get_rng_state()
    tokens: list[list[int]] = []
    for version, scale, seed in ((0, 1.0, 0), (1, 0.9, 0), (0, 1.0, 0), (0, 1.0, 1)):
        tensors = {name: t * scale for name, t in originals.items()}
        shards = engine.shards(engine.weight_specs, layout)
        parts = {s.name: tensors[s.name][slices(shards.box(s, rank))] for s in engine.weight_specs}
        fill(engine, parts, version)
        requests = [replace(r, seed=seed) for r in requests_for(params=params)]
        completions = complete(engine, requests)
        for r in requests:
            c = completions[r.sample_id]
            logits = _logits(tensors, [*r.prompt, *c.tokens.tolist()])[len(r.prompt) - 1 : -1] / params.temperature
            wanted = logits.log_softmax(-1).gather(1, torch.from_numpy(c.tokens)[:, None])[:, 0]
            assert c.logprobs.tolist() == pytest.approx(wanted.tolist(), abs=1e-4)
        tokens.append([t for i in IDS for t in completions[i].tokens.tolist()])
    assert torch.equal(torch.get_rng_state(), before)
    assert tokens[0] == tokens[2]
    assert tokens[3] != tokens[0] != tokens[1]
    return tokens


@pytest.mark.parametrize("layout", [ALONE, Layout((0, 1), 1, 2)], ids=["tp1", "tp2"])
def test_it_may_sample_with_its_own_sampler(layout: Layout) -> None:
    results = spawn(len(layout.ranks), with_its_own_sampler, layout)
    assert all(tokens == results[0] for tokens in results)


def in_16_bits(rank: int) -> None:
    """Logits have not been rounded, and the folder that vLLM reads is that of the model."""
    engine = make_engine(dtype=torch.bfloat16)
    fill(engine, {name: t.bfloat16() for name, t in weights("qwen2").items()})
    with patch.object(sampler, "sample", wraps=sample) as sampled:
        complete(engine, requests_for([0, 1]))
    logits = sampled.call_args.args[0]
    assert logits.dtype == torch.float32
    assert not torch.equal(logits, logits.bfloat16().float())
    config = engine.engine.vllm_config
    assert config.model_config.model == config_folder(source("qwen2"))
    assert config.scheduler_config.max_num_batched_tokens == 2048


def test_logits_of_16_bits_are_not_rounded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    spawn(1, in_16_bits)


def test_an_unknown_argument_is_refused() -> None:
    config = CONFIG.model_copy(update={"vllm": VllmConfig(args={"max_num_batched_token": 48})})
    with pytest.raises(ConfigError, match="'max_num_batched_token' is no argument of vLLM's EngineArgs"):
        VllmEngine.check(source("qwen2"), config, CPU, None)


def two_ranks(rank: int, arch: str) -> list[float]:
    """Trains dp 2, sharded; generates tp 2. A weight that does not come over is named."""
    both, specs = Layout((0, 1), 1, 2), make_engine_specs(arch)
    trained, generates = Shards(Layout((0, 1), 2), 2), VllmEngine.shards(specs, both)
    engine, transport = make_engine(arch, both), make_transport(rank, 2)
    full = weights(arch)
    held = {s.name: full[s.name][slices(trained.box(s, rank))].clone() for s in specs}
    transfer = WeightSync(specs, trained, generates, rank, torch.float32, Topology.single(2))
    check = WeightCheck(trained, generates, rank, torch.float32)
    targets = engine.weight_targets()
    transport.run(transfer.run(held, targets))
    transport.run(check.compare(specs, held, engine.held_weights(), 0))
    engine.commit_weights(0)
    completions = complete(engine, requests_for())
    got, want = [as_response(completions[i]) for i in IDS], expected(arch)
    assert same(got, want)
    missed = "model.layers.1.mlp.up_proj.weight"
    held[missed] += 1.0
    rest = dict(targets)
    rest[missed] = torch.empty_like(targets[missed])  # the weight sync goes nowhere
    transport.run(transfer.run(held, rest))
    with pytest.raises(WeightsError, match=rf"version 1: {missed} differs"):
        transport.run(check.compare(specs, held, engine.held_weights(), 1))
    transport.close()
    return [abs(a - b) for g, w in zip(got, want, strict=True) for a, b in zip(g[1], w[1], strict=True)]


def make_engine_specs(arch: str) -> Any:
    from distflow.model.tensor_parallel import parameter_specs, tp_styles

    skeleton = source(arch).skeleton()
    return parameter_specs(skeleton, tp_styles(skeleton, 2, "here"))


@pytest.mark.parametrize("arch", ["qwen2", "llama"])  # tied and untied embeddings
def test_two_ranks_generate_together_from_the_shards_of_a_trainer(arch: str) -> None:
    differences = spawn(2, two_ranks, arch)
    assert max(map(max, differences)) < 1e-4


def with_adapter(rank: int, layout: Layout) -> None:
    """An adapter is apart from the weights, and both together are what a merged model would be."""
    lora = LoraConfig(rank=4)
    engine = make_engine("qwen2", layout, lora)
    shards = engine.shards(engine.weight_specs, layout)
    noise = torch.Generator().manual_seed(3)
    adapter = {s.name: 0.3 * torch.randn(s.shape, generator=noise) for s in engine.adapter_specs}
    full, base = weights("qwen2"), dict[str, Tensor]()
    for name in full:
        b, a = (adapter.get(name.removesuffix(".weight") + f".lora_{m}.default.weight") for m in "BA")
        base[name] = full[name] if a is None or b is None else full[name] - b @ a
    parts = base | adapter
    specs = [*engine.weight_specs, *engine.adapter_specs]
    fill(engine, {s.name: parts[s.name][slices(shards.box(s, rank))] for s in specs})
    completions = complete(engine, requests_for())
    assert same([as_response(completions[i]) for i in IDS], expected("qwen2"))
    if layout == ALONE:
        check = WeightCheck(shards, shards, rank, torch.float32)
        list(check.compare(engine.adapter_specs, adapter, engine.held_weights(), 1))
        missed = engine.adapter_specs[3].name
        adapter[missed] += 1.0  # trained, and not synced
        with pytest.raises(WeightsError, match=rf"version 2: {missed} differs"):
            list(check.compare(engine.adapter_specs, adapter, engine.held_weights(), 2))


@pytest.mark.parametrize("layout", [ALONE, Layout((0, 1), 1, 2)], ids=["tp1", "tp2"])
def test_an_adapter_is_held_apart(layout: Layout) -> None:
    spawn(len(layout.ranks), with_adapter, layout)
