"""A rollout's log-probs are the trainer's, to the bit."""

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from distflow import cpu
from distflow.batch.batch import Batch, Ragged
from distflow.config.schema import LoraConfig
from distflow.cpu import torch_threads
from distflow.cpu.modules import use_cpu_modules
from distflow.model import attention
from distflow.model.experts import use_experts_blocks
from distflow.model.lora import LoraAdapter, adapter_pairs, merge
from distflow.model.source import kv_bytes
from distflow.rollout.builtin.generator import CacheLimits, Generator
from distflow.rollout.engine import Completion, Request, SamplingParams
from distflow.train.heads import LogprobHead
from distflow.train.packing import micro_batches, pack
from tiny import ARCHITECTURES, MIXTURES, config_of, randomize_weights

CPU, SEED = torch.device("cpu"), 5
Response = tuple[tuple[int, ...], Any, Any]  # prompt, tokens, log-probs
SIZES = {"vocab_size": 1003, "hidden_size": 272, "intermediate_size": 304, "head_dim": 40}
WINDOW = 33


def model_of(arch: str, **changes: Any) -> PreTrainedModel:
    """A model whose dimensions are no multiples of what kernels like."""
    sizes = SIZES | ({"sliding_window": WINDOW} if arch in ("mistral", "gemma2") else {})
    sizes |= {"moe_intermediate_size": 40} if arch == "qwen3_moe" else {}
    if arch.startswith("gemma"):  # torch computes its activation, and the last few numbers of a row in another way
        sizes |= {"hidden_size": 256, "intermediate_size": 320}
    config = config_of(arch, **sizes, max_position_embeddings=1024, **changes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME, dtype=torch.float32)
    use_experts_blocks(model)
    use_cpu_modules(model)
    randomize_weights(model)
    for p in model.parameters():
        p.data *= 0.2 if p.ndim > 1 else 1
    return model.requires_grad_(False)


def rollout(model: PreTrainedModel, slots: int, batches: int, params: SamplingParams, turns: int) -> list[Response]:
    """The responses of all turns, to prompts that are long and short, and some of them alike."""
    limits = CacheLimits(kv_bytes(model.config, torch.float32, 1), 1 << 28, slots)
    generator = Generator(model, limits, CPU, max_batches=batches)
    draw, done = np.random.default_rng(0), dict[int, Completion]()
    prompts = [tuple(draw.integers(0, 1003, n).tolist()) for n in (270, 1, 17, 40)] * 4
    responses: list[Response] = []
    with generator.serving(len(prompts), 700) if turns > 1 else nullcontext():
        for turn in range(turns):
            for i, prompt in enumerate(prompts):
                generator.add_request(Request(i, prompt, params, SEED + turn, keep=turns > 1))
            while generator.has_unfinished:
                done |= {c.sample_id: c for c in generator.step()}
            responses += [(prompt, done[i].tokens, done[i].logprobs) for i, prompt in enumerate(prompts)]
            prompts = [(*prompt, *done[i].tokens.tolist(), 7, i) for i, prompt in enumerate(prompts)]
    return responses


def training_logprobs(model: PreTrainedModel, responses: list[Response], budget: int, temperature: float) -> Ragged:
    """The trainer's log-probs, in micro-batches of so many tokens."""
    prompts, tokens = (Ragged.of([torch.tensor(r[i]) for r in responses]) for i in (0, 1))
    ids = np.arange(len(responses))
    batch = Batch(ids, ids, {"prompt_tokens": prompts, "response_tokens": tokens})
    head, result = LogprobHead(model), torch.full((int(tokens.lengths.sum()),), torch.nan)
    for index in micro_batches(batch, ids, budget):
        packed = pack(batch, index)
        logprobs = head(packed, temperature)[0]
        for i, part in zip(packed.index, packed.model_tokens.spread(logprobs), strict=True):
            result[tokens.starts[i] : tokens.starts[i] + len(part)] = part
    return Ragged.packed(result, tokens.lengths)


PLAIN = SamplingParams(12)
GREEDY, TRUNCATED = SamplingParams(12, temperature=0), SamplingParams(12, 0.7, top_p=0.9, repetition_penalty=1.1)
WAYS: dict[str, tuple[int, int, SamplingParams, int, int]] = {  # slots, batches, sampling, turns, threads
    "3 slots": (3, 1, PLAIN, 1, 1),
    "2 batches, 3 turns": (64, 2, PLAIN, 3, 2),
    "greedy, 2 threads": (64, 1, GREEDY, 1, 2),
    "truncated, 2 turns": (64, 1, TRUNCATED, 2, 1),
}
MORE = list(WAYS)[2:]
CASES = [(arch, way) for arch in (*ARCHITECTURES, *MIXTURES) for way in WAYS if arch == "qwen3" or way not in MORE]


@pytest.mark.parametrize(("arch", "way"), CASES)
def test_log_probs_of_rollout_and_trainer_are_the_same(arch: str, way: str) -> None:
    model = model_of(arch)
    slots, batches, params, turns, threads = WAYS[way]
    with torch.no_grad(), torch_threads(threads):
        responses = rollout(model, slots, batches, params, turns)
        for budget in (1, 500):
            got = training_logprobs(model, responses, budget, params.temperature or 1.0)
            wrong = [np.abs(g.numpy() - r[2]).max() for g, r in zip(got, responses, strict=True)]
            assert max(wrong) == 0, f"{np.count_nonzero(wrong)} of {len(wrong)} responses differ, with budget {budget}"


def adapted(model: PreTrainedModel) -> LoraAdapter:
    """Injects an adapter with random weights."""
    adapter, noise = LoraAdapter(model, LoraConfig(rank=3)), torch.Generator().manual_seed(3)
    for spec in adapter.specs:
        weight = torch.randn(spec.shape, generator=noise) * 0.05
        model.get_submodule(spec.name.removesuffix(".weight")).weight = torch.nn.Parameter(weight)
    return adapter


@pytest.mark.parametrize("arch", ["qwen2", "gemma2", "qwen3_moe"])
def test_an_adapter_is_trained_as_it_is_merged_for_the_rollout(arch: str) -> None:
    """Also if the weights are merged in shards of some rows."""
    policy, trained = model_of(arch), model_of(arch)
    adapter = adapted(trained)
    for name, pair in adapter_pairs(dict(trained.named_parameters())).items():
        weight = policy.get_parameter(name)
        shards = [
            merge(weight[rows], (pair[0][rows], pair[1]), adapter.scale) for rows in (slice(0, 9), slice(9, None))
        ]
        weight.data = torch.cat(shards)
    with torch.no_grad():
        responses = rollout(policy, 64, 1, PLAIN, 1)
        for got, (_, _, logprobs) in zip(training_logprobs(trained, responses, 700, 1.0), responses, strict=True):
            assert (got.numpy() == logprobs).all()
        assert rollout(model_of(arch), 64, 1, PLAIN, 1)[0][1].tolist() != responses[0][1].tolist()


def test_the_gradient_of_an_adapter_is_that_of_its_matrices_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = model_of("qwen2")
    adapted(trained)

    def grads() -> list[torch.Tensor]:
        prompts = [((1, 2, 3), np.arange(9), None), ((5,), np.arange(4), None)]
        return list(torch.autograd.grad(training_logprobs(trained, prompts, 64, 1.0).joined().sum(), wanted))

    wanted = [p for p in trained.parameters() if p.requires_grad]
    ours = grads()
    monkeypatch.setattr(cpu, "_kernels", lambda: None)
    for a, b in zip(ours, grads(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3 * float(b.abs().max()))
