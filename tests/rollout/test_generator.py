"""A generator gives what a plain loop without a cache gives: whoever else is in the batch, however it is divided."""

import gc
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import AutoModelForCausalLM

from distflow.errors import ConfigError
from distflow.model import attention
from distflow.rollout.builtin import generator as generator_module
from distflow.rollout.builtin.generator import Generator
from distflow.rollout.builtin.panel_cache import PanelCache
from distflow.rollout.engine import Request, SamplingParams
from distflow.rollout.sampling import sample
from rollout.plain_loop import (
    EVERYBODY,
    IDS,
    PARAMS,
    PROMPT_OF,
    PROMPTS,
    SEED,
    STOP,
    as_response,
    complete,
    drain,
    expected,
    generate,
    generator,
    generator_for,
    passes,
    requests_for,
    same,
)
from tiny import ARCHITECTURES, VOCABULARY, config_of, pair, side_by_side


def cache_bytes(generator: Generator) -> int:
    layers = [layer for cache in generator.caches for layer in cache.layers.values()]
    panels = [p for cache in generator.caches if isinstance(cache, PanelCache) for p in cache.panels.values()]
    return sum(layer.nbytes for layer in layers) + sum(p.keys.nbytes + p.values.nbytes for p in panels)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.usefixtures("backend")
def test_it_generates_what_a_plain_loop_does_in_a_batch_of_any_size(arch: str) -> None:
    want = expected(arch)
    assert len({len(tokens) for tokens, _, _ in want}) > 3  # they end at different times
    for max_sequences in (1, 3, 8, 64):
        assert same(generate(generator(arch, max_sequences)), want), max_sequences


@pytest.mark.parametrize(
    "params",
    [
        replace(PARAMS, temperature=0.0),
        replace(PARAMS, max_tokens=1),
        replace(PARAMS, min_tokens=6),
        replace(PARAMS, top_k=5, top_p=0.8),
        replace(PARAMS, temperature=0.7, top_p=0.6),
        replace(PARAMS, stop=frozenset()),
        replace(PARAMS, min_p=0.1, repetition_penalty=1.8),
    ],
    ids=["greedy", "one token", "min tokens", "top-k and top-p", "top-p", "no stop", "min-p and penalty"],
)
@pytest.mark.usefixtures("one_thread")
def test_all_sampling_parameters_have_the_effect_they_have_in_a_plain_loop(params: SamplingParams) -> None:
    assert same(generate(generator("gemma2", 4), params=params), expected("gemma2", params=params))


@pytest.mark.parametrize("arch", ["qwen2", "gemma2", "mistral"])
@pytest.mark.usefixtures("backend")
def test_a_long_prompt_is_computed_in_pieces_between_which_others_decode(
    arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = expected(arch)
    monkeypatch.setattr(generator_module, "_PREFILL_TOKENS_CPU", 4)  # the longest prompt, of two samples, has 21
    with passes() as tokens:
        assert same(generate(generator(arch)), want)
    assert max(tokens["Prefill"] + tokens["Extension"]) == 4
    assert sum(tokens["Prefill"] + tokens["Extension"]) == sum(map(len, PROMPTS))  # each token once
    waiting = requests_for(EVERYBODY[:8])
    some = generator(arch)
    for request in waiting:
        some.add_request(request)
    early = some.step()  # the first ones finish before the long prompts are computed
    assert not {IDS[i] for i, p in enumerate(PROMPT_OF) if len(PROMPTS[p]) > 8} & {c.sample_id for c in early}
    some.abort([waiting[i].id for i, p in enumerate(PROMPT_OF[:8]) if p == 5])  # while its pieces are computed
    left = [(r, w) for r, w, p in zip(waiting, want, PROMPT_OF, strict=False) if p != 5]
    assert same([as_response(c) for c in drain(some, [r for r, _ in left], early)], [w for _, w in left])


def test_a_response_ends_with_the_first_stop_token_or_at_the_limit() -> None:
    responses = generate(generator("llama", 3))
    assert {finished for _, _, finished in responses} == {True, False}
    for tokens, logprobs, finished in responses:
        assert len(tokens) == len(logprobs)
        assert not STOP & set(tokens[:-1])
        assert finished == (tokens[-1] in STOP)
        assert finished or len(tokens) == PARAMS.max_tokens


def test_a_stop_token_at_the_limit_finishes_a_response() -> None:
    responses = generate(generator("llama"), params=replace(PARAMS, max_tokens=1))
    assert {finished for _, _, finished in responses} == {True, False}
    assert all(finished == (tokens[0] in STOP) for tokens, _, finished in responses)


def test_no_response_ends_before_min_tokens() -> None:
    short = generate(generator("llama"))
    long = generate(generator("llama"), params=replace(PARAMS, min_tokens=5))
    assert min(len(tokens) for tokens, _, _ in short) < 5
    assert min(len(tokens) for tokens, _, _ in long) > 5  # a stop token comes after five others
    assert all(not STOP & set(tokens[:5]) for tokens, _, _ in long)


def test_greedy_responses_do_not_depend_on_the_seed() -> None:
    greedy, qwen2 = replace(PARAMS, temperature=0.0), generator("qwen2")
    assert same(generate(qwen2, params=greedy, seed=1), generate(qwen2, params=greedy, seed=2))
    assert not same(generate(qwen2, seed=1), generate(qwen2, seed=2))


def test_the_order_of_requests_does_not_matter() -> None:
    want = generate(generator("qwen2", 4))
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(len(IDS)).tolist()
        assert same(generate(generator("qwen2", 4), order), [want[i] for i in order])


def test_the_others_in_the_batch_do_not_matter() -> None:
    want = generate(generator("gemma2", 4))
    for samples in ([2], [0, 3, 6, 12], [13, 4], list(range(0, 14, 3))):
        assert same(generate(generator("gemma2", 4), samples), [want[i] for i in samples])


def test_equal_prompts_are_one_prompt() -> None:
    """Also if each request has a copy of it."""
    mistral, tokens = generator("mistral", 8), list(PROMPTS[1])
    responses = []
    for prompts in ([PROMPTS[1]] * 4, [tuple(tokens) for _ in range(4)]):
        with passes() as computed:
            requests = [Request(IDS[i], prompt, PARAMS, SEED) for i, prompt in enumerate(prompts)]
            responses.append([as_response(c) for c in complete(mistral, requests)])
        assert computed["Prefill"] == [len(tokens)]
    assert same(*responses)
    assert len({tuple(tokens) for tokens, _, _ in responses[0]}) > 2


@pytest.mark.parametrize("arch", ["qwen2", "gemma2", "mistral"])
@pytest.mark.usefixtures("backend")
def test_old_contents_of_the_cache_do_not_matter(arch: str) -> None:
    reused, cache = generator(arch, 4), None
    for call, samples in enumerate([[2, 10, 0, 5, 7], [4], EVERYBODY, [4, 8], [2], [1, 13, 6, 3, 12]]):
        assert same(generate(reused, samples), expected(arch, samples)), call
        cache = cache or reused.caches[0]
        with torch.inference_mode():
            panels = cache.panels.values() if isinstance(cache, PanelCache) else ()
            both: Any
            for both in [*cache.layers.values(), *((p.keys, p.values) for p in panels)]:
                both[0][:], both[1][:] = 1e4, -1e4  # as bad as stale values get
    assert reused.caches[0] is cache  # it was used again, not made anew


def test_the_cache_grows_with_the_longest_request() -> None:
    qwen2 = generator("qwen2", 8)
    for samples in ([4], [4, 8], [2, 10], EVERYBODY):
        assert same(generate(qwen2, samples), expected("qwen2", samples))
        longest = max(len(PROMPTS[PROMPT_OF[i]]) for i in samples) + PARAMS.max_tokens
        assert qwen2.caches[0].longest >= longest


@pytest.mark.usefixtures("backend")
def test_weights_may_change_between_calls() -> None:
    model = deepcopy(pair("qwen2").ours)
    updated = generator_for(model, 8)
    assert same(generate(updated), expected("qwen2"))
    for module in list(model.modules()):  # new tensors in old modules
        for name, p in list(module.named_parameters(recurse=False)):
            setattr(module, name, torch.nn.Parameter(p.flip(0), requires_grad=False))
    model.tie_weights()
    responses = generate(updated)
    assert not same(responses, expected("qwen2"))
    assert same(responses, generate(generator_for(model, 8)))


@pytest.mark.usefixtures("backend")
def test_the_memory_of_weights_can_be_freed_between_calls() -> None:
    model = deepcopy(pair("qwen2").ours)
    tensors = side_by_side(model)
    generate(generator_for(model, 8))
    storages = [StorageWeakRef(t.untyped_storage()) for t in tensors.values()]
    for p in model.parameters():
        p.data = torch.empty(0)
    del tensors
    gc.collect()
    assert all(storage.expired() for storage in storages)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.usefixtures("backend")
def test_weights_are_the_same_to_the_bit_after_generation(arch: str) -> None:
    model = deepcopy(pair(arch).ours)
    side_by_side(model)
    before = deepcopy(model.state_dict())
    generate(generator_for(model, 4))
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


@pytest.mark.usefixtures("backend")
def test_a_failure_leaves_the_weights_and_the_generator_usable() -> None:
    model = deepcopy(pair("qwen3").ours)
    failing, before = generator_for(model, 4), deepcopy(model.state_dict())
    for prompt in ((VOCABULARY + 1,), (1, 2, 3, VOCABULARY + 1)):
        with pytest.raises(IndexError):
            complete(failing, [Request(i, (1,), PARAMS, SEED) for i in range(8)] + [Request(8, prompt, PARAMS, SEED)])
        assert not failing.has_unfinished
        assert failing.step() == []
        assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
        assert same(generate(failing), expected("qwen3"))


def test_a_prompt_is_computed_once_for_all_of_its_samples() -> None:
    params = replace(PARAMS, max_tokens=1)
    with passes() as computed:
        complete(generator("qwen2"), [Request(i, PROMPTS[(5, 1)[i % 2]], params, SEED) for i in range(16)])
    assert computed == {"Prefill": [len(PROMPTS[5]) + len(PROMPTS[1])], "Extension": [], "Decode": []}


def test_a_free_slot_is_taken_by_a_waiting_request() -> None:
    params = replace(PARAMS, min_tokens=1)  # no response ends right after the prompt
    with passes() as computed:
        responses = generate(generator("qwen2", 3), params=params)
    assert sum(computed["Decode"]) == sum(len(tokens) - 1 for tokens, _, _ in responses)
    full = [n == 3 for n in computed["Decode"]]
    assert all(full[: full.index(False)])
    assert not any(full[full.index(False) :])  # as long as requests wait, every pass is full
    assert same(responses, expected("qwen2", params=params))


def test_long_prompts_are_computed_in_several_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generator_module, "_PREFILL_TOKENS_CPU", 12)
    gemma2, params = generator("gemma2"), replace(PARAMS, max_tokens=1)
    with passes() as computed:
        responses = generate(gemma2, params=params)
    assert max(computed["Prefill"]) == 12
    assert computed["Extension"] == [9]  # of the one prompt that is longer than the budget, alone
    assert sum(computed["Prefill"] + computed["Extension"]) == sum(map(len, PROMPTS))
    assert same(responses, expected("gemma2", params=params))
    assert same(generate(gemma2), expected("gemma2"))


@pytest.mark.usefixtures("backend")
def test_the_memory_of_the_cache_limits_the_batch() -> None:
    longest = 21 + PARAMS.max_tokens
    llama = generator("llama", cache_tokens=2 * longest + 5)
    with passes() as computed:
        responses = generate(llama)
    assert llama.caches[0].pages == 2
    assert max(computed["Decode"]) == 2
    assert same(responses, expected("llama"))


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.usefixtures("backend")
def test_a_token_takes_the_memory_that_is_planned_for_it(arch: str) -> None:
    """If heads and pages are multiples of 16, as kernels have them."""
    config = config_of(arch, head_dim=16)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME, dtype=torch.float32)
    limited, params = generator_for(model, 4), replace(PARAMS, stop=frozenset())
    complete(limited, [Request(0, tuple(range(1, 33 - params.max_tokens)), params, SEED)])
    (cache,) = limited.caches
    assert cache.page == 32
    assert cache_bytes(limited) == cache.longest * limited.limits.bytes_per_token


def test_a_cache_too_small_for_one_sequence_is_an_error() -> None:
    llama = generator("llama", cache_tokens=29)
    with pytest.raises(
        ConfigError, match=r"rollout\.kv_cache_gb: a sequence of 30 tokens needs .* lower rollout\.max_to"
    ):
        generate(llama)
    params = replace(PARAMS, max_tokens=8)
    assert same(generate(llama, params=params), expected("llama", params=params))


def test_no_requests_are_no_trouble() -> None:
    llama = generator("llama")
    assert not llama.has_unfinished
    assert llama.step() == []
    assert generate(llama, []) == []


def test_generation_continues_from_the_tokens_that_replicas_agree_on() -> None:
    """The tokens of another replica count: the model goes on from them, and they are the response."""
    replica = generator("qwen2", 4, agree=lambda tokens: (tokens + 1) % VOCABULARY)
    for (tokens, _, finished), i in zip(generate(replica), EVERYBODY, strict=True):
        prompt, want = PROMPTS[PROMPT_OF[i]], list[int]()
        while len(want) < PARAMS.max_tokens and not (want and want[-1] in STOP):
            logits = pair("qwen2").alone([*prompt, *want])[-1:]
            token, _ = sample(logits, PARAMS, SEED, np.array([IDS[i]]), np.array([len(want)]))
            want.append((int(token) + 1) % VOCABULARY)
        assert tokens == want
        assert finished == (want[-1] in STOP)
