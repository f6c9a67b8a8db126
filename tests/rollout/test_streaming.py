"""Requests may come while others run, with parameters of their own: each still gets what it would get alone."""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distflow.cpu import threaded_batches
from distflow.errors import ConfigError
from distflow.rollout.builtin import generator as rollout_generator
from distflow.rollout.builtin.generator import Generator
from distflow.rollout.builtin.panel_cache import PanelCache
from distflow.rollout.engine import Completion, Request, SamplingParams
from rollout.plain_loop import (
    EVERYBODY,
    PARAMS,
    PROMPTS,
    SEED,
    as_response,
    complete,
    drain,
    expected,
    generate,
    generator,
    generator_for,
    passes,
    plain_loop,
    requests_for,
    same,
)
from tiny import pair


@pytest.fixture(params=[1, 3])
def max_batches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(threaded_batches, "_MIN_SEQUENCES", 1)
    monkeypatch.setattr(threaded_batches, "_MIN_WITH_KERNELS", 1)
    return int(request.param)


def trickle(generator: Generator, requests: list[Request], sizes: list[int]) -> list[Completion]:
    """Adds so many requests before each step, the rest before the last one."""
    left, finished = iter(requests), list[Completion]()

    def some(count: int) -> Iterator[Request]:
        return (request for _, request in zip(range(count), left, strict=False))

    for size in sizes:
        for request in some(size):
            generator.add_request(request)
        finished += generator.step()
    for request in left:
        generator.add_request(request)
    return drain(generator, requests, finished)


@pytest.mark.parametrize("max_sequences", [3, 64])
@pytest.mark.usefixtures("backend")
def test_requests_may_be_added_while_others_run(max_sequences: int, max_batches: int) -> None:
    qwen3 = generator("qwen3", max_sequences, max_batches=max_batches)
    order = [2, 10, 0, 13, 4, 6, 8, 1, 3, 5, 7, 9, 11, 12]
    completions = trickle(qwen3, requests_for(order), [3, 0, 2, 5, 1])
    assert same([as_response(c) for c in completions], expected("qwen3", order))
    assert not qwen3.has_unfinished


@pytest.mark.usefixtures("one_thread")
@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.permutations(EVERYBODY), st.lists(st.integers(0, 5), max_size=8), st.integers(1, 6))
def test_when_a_request_is_added_does_not_matter(order: list[int], sizes: list[int], max_sequences: int) -> None:
    completions = trickle(generator("qwen2", max_sequences), requests_for(order), sizes)
    assert same([as_response(c) for c in completions], expected("qwen2", order))


def test_a_request_joins_a_batch_that_runs() -> None:
    params = replace(PARAMS, stop=frozenset(), max_tokens=12)
    one, other, late = (Request(i, PROMPTS[i], params, SEED) for i in (0, 1, 2))
    qwen2 = generator("qwen2", 2)
    short = replace(one, params=replace(params, max_tokens=4))
    with passes() as computed:
        qwen2.add_request(short)
        qwen2.add_request(other)
        (first,) = qwen2.step()
        assert first.sample_id == short.sample_id
        qwen2.add_request(late)
        completions = drain(qwen2, [short, other, late], [first])
    assert same([as_response(c) for c in completions], [plain_loop("qwen2", r) for r in (short, other, late)])
    assert computed["Decode"] == [2] * 3 + [2] * 8 + [1] * 3  # the late one in the free slot, then alone


def test_a_stream_that_starts_with_one_request_becomes_a_batch() -> None:
    params = replace(PARAMS, stop=frozenset(), max_tokens=12)
    requests = [Request(i, PROMPTS[i % len(PROMPTS)], params, SEED) for i in range(5)]
    requests[0] = replace(requests[0], params=replace(params, max_tokens=2))
    qwen2 = generator("qwen2", 64)
    with passes() as computed:
        qwen2.add_request(requests[0])
        qwen2.add_request(requests[1])
        finished = qwen2.step()
        for request in requests[2:]:
            qwen2.add_request(request)
        completions = drain(qwen2, requests, finished)
    assert same([as_response(c) for c in completions], [plain_loop("qwen2", r) for r in requests])
    assert max(computed["Decode"]) == 4  # all that had come by then


@pytest.mark.parametrize("page", [1, 3, 8])
@pytest.mark.parametrize("arch", ["qwen3", "gemma2"])
@pytest.mark.usefixtures("backend")
def test_pages_do_not_change_a_token(arch: str, page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a cache that is too small for all: sequences wait, and go on where they were."""
    monkeypatch.setattr(rollout_generator, "PAGE", page)
    for tokens in (36, 90, 10_000):
        assert same(generate(generator(arch, 8, cache_tokens=tokens)), expected(arch)), tokens


def test_a_limit_of_32768_tokens_reserves_no_memory_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty", torch.zeros)  # what is not 0 was written here, not before
    params = replace(PARAMS, max_tokens=32_768)
    qwen2 = generator("qwen2", 64, cache_tokens=70_000)
    with passes() as computed:
        completions = complete(qwen2, requests_for(range(8), params))
    assert max(computed["Decode"]) == 8  # together, although two at their longest would fill the cache
    assert all(c.finished for c in completions)
    (cache,) = qwen2.caches
    assert isinstance(cache, PanelCache)
    touched = {int(page) for panels in cache.panels.values() for page in np.flatnonzero(panels.keys.any((1, 2, 3, 4)))}
    longest = max(len(r.prompt) + len(c.tokens) for r, c in zip(requests_for(range(8)), completions, strict=True))
    assert len(touched) <= 8 * -(-longest // 256)


def test_a_request_that_is_longer_than_a_batch_s_share_waits_and_then_runs(max_batches: int) -> None:
    qwen2 = generator("qwen2", 8, cache_tokens=35, max_batches=max_batches)
    short = requests_for([4, 8, 1, 13])  # prompts of at most 3 tokens
    long = requests_for([2, 0])  # 21 and 12
    for request in short:
        qwen2.add_request(request)
    finished = qwen2.step()
    for request in long:
        qwen2.add_request(request)
    completions = drain(qwen2, short + long, finished)
    assert same([as_response(c) for c in completions], [plain_loop("qwen2", r) for r in short + long])
    assert qwen2._longest >= 21 + PARAMS.max_tokens


def test_a_request_too_long_for_the_memory_fails_when_it_is_its_turn() -> None:
    llama = generator("llama", cache_tokens=29)
    short, long = requests_for([4, 8]), requests_for([2])
    for request in short:
        llama.add_request(request)
    finished = llama.step()
    llama.add_request(long[0])
    while len(finished) < len(short):
        finished += llama.step()
    assert same(sorted(as_response(c) for c in finished), sorted(plain_loop("llama", r) for r in short))
    with pytest.raises(ConfigError, match="a sequence of 30 tokens needs"):
        llama.step()
    assert not llama.has_unfinished


@pytest.mark.usefixtures("backend")
def test_requests_of_one_batch_may_differ_in_parameters_and_seeds(max_batches: int) -> None:
    variants = [
        (PARAMS, SEED),
        (PARAMS, 5),
        (replace(PARAMS, temperature=0.0), SEED),
        (replace(PARAMS, max_tokens=3), SEED),
        (replace(PARAMS, top_k=5, top_p=0.8, min_tokens=4), 5),
        (replace(PARAMS, stop=frozenset(range(30))), SEED),
        (replace(PARAMS), SEED),  # equal to the first, another object
    ]
    requests = [Request(i, PROMPTS[i % 3], *variants[i % len(variants)]) for i in range(21)]
    completions = complete(generator("qwen3", 16, max_batches=max_batches), requests)
    assert same([as_response(c) for c in completions], [plain_loop("qwen3", r) for r in requests])


@pytest.mark.usefixtures("one_thread")
def test_requests_of_one_batch_may_differ_in_seeds_alone() -> None:
    requests = [Request(i, PROMPTS[0], PARAMS, seed=i % 2) for i in range(6)]
    completions = complete(generator("qwen3"), requests)
    assert same([as_response(c) for c in completions], [plain_loop("qwen3", r) for r in requests])


@pytest.mark.parametrize("params", [PARAMS, replace(PARAMS, min_tokens=6), replace(PARAMS, stop=frozenset())])
@pytest.mark.usefixtures("one_thread")
def test_a_response_can_be_continued_with_the_tokens_it_would_have_had(params: SamplingParams) -> None:
    gemma2 = generator("gemma2", 4)
    whole = generate(gemma2, params=params)
    for done in (1, 3):
        unfinished = [i for i in EVERYBODY if len(whole[i][0]) > done]
        assert unfinished
        requests = [
            replace(r, prompt=r.prompt + tuple(whole[i][0][:done]), position=done)
            for i, r in zip(unfinished, requests_for(unfinished, params), strict=True)
        ]
        rest = [as_response(c) for c in complete(gemma2, requests)]
        assert same(rest, [(whole[i][0][done:], whole[i][1][done:], whole[i][2]) for i in unfinished])
        assert same(rest, [plain_loop("gemma2", r) for r in requests])


def test_a_continued_response_takes_no_more_of_the_cache_than_an_uninterrupted_one() -> None:
    request = Request(0, tuple(np.arange(10).tolist()), replace(PARAMS, stop=frozenset()), SEED, position=4)
    qwen2 = generator("qwen2")
    (completion,) = complete(qwen2, [request])
    assert len(completion.tokens) == PARAMS.max_tokens - 4
    assert qwen2.caches[0].page == 10 + PARAMS.max_tokens - 4


@pytest.mark.usefixtures("backend")
def test_stopping_drops_requests_and_restores_the_weights(max_batches: int) -> None:
    model = deepcopy(pair("qwen3").ours)
    before, qwen3 = deepcopy(model.state_dict()), generator_for(model, 4, max_batches=max_batches)
    for request in requests_for():
        qwen3.add_request(request)
    finished = qwen3.step()
    assert 0 < len(finished) < len(EVERYBODY)
    qwen3.stop()
    assert not qwen3.has_unfinished
    assert qwen3.step() == []
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert same(generate(qwen3), expected("qwen3"))


def test_completions_name_the_weights_they_were_generated_with() -> None:
    qwen2 = generator("qwen2")
    for version in (0, 7):
        for request in requests_for([0, 1]):
            qwen2.add_request(request)
        qwen2.weight_version = version
        while qwen2.has_unfinished:
            assert {c.weight_version for c in qwen2.step()} == {version}


@pytest.mark.usefixtures("backend")
def test_a_caller_with_more_requests_wakes_it(max_batches: int) -> None:
    """However often it returns early, each request gets what it would get alone."""
    qwen2, order = generator("qwen2", 64, max_batches=max_batches), EVERYBODY[:9]
    waiting, finished, early = requests_for(order), list[Completion](), 0
    requests = list(waiting)
    while waiting or qwen2.has_unfinished:
        if waiting:
            qwen2.add_request(waiting.pop())
        completions = qwen2.step(wake=lambda: True)
        early += not completions
        finished += completions
    assert early > 5
    assert same([as_response(c) for c in drain(qwen2, requests, finished)], expected("qwen2", order))


def test_requests_of_one_sample_are_told_apart() -> None:
    """Two branches of a conversation: same sample, other positions."""
    qwen2, params = generator("qwen2", 4), replace(PARAMS, stop=frozenset(), max_tokens=40)
    branches = [Request(7, PROMPTS[i], params, SEED, 10 * i, 3 + i, 100 + i) for i in range(2)]
    for request in branches:
        qwen2.add_request(request)
    finished = dict[int, Completion]()
    while qwen2.has_unfinished:
        finished |= {c.request_id: c for c in qwen2.step()}
    assert {i: (c.sample_id, len(c.tokens)) for i, c in finished.items()} == {100: (7, 3), 101: (7, 4)}
    for request in branches:
        alone = replace(request, params=replace(params, max_tokens=request.position + request.room))
        assert same([as_response(finished[request.id])], [plain_loop("qwen2", alone)])


def test_an_aborted_request_has_no_completion_and_frees_its_place(max_batches: int) -> None:
    qwen2, params = generator("qwen2", 3, max_batches=max_batches), replace(PARAMS, stop=frozenset(), max_tokens=12)
    requests = [Request(i, PROMPTS[i], params, SEED) for i in range(6)]
    for request in requests:
        qwen2.add_request(request)
    assert qwen2.step(wake=lambda: True) == []
    qwen2.abort([0, 4, 99])  # one that runs, one that waits, none
    finished = dict[int, Completion]()
    while qwen2.has_unfinished:
        finished |= {c.sample_id: c for c in qwen2.step()}
    assert sorted(finished) == [1, 2, 3, 5]
    left = [1, 2, 3, 5]
    assert same([as_response(finished[i]) for i in left], [plain_loop("qwen2", requests[i]) for i in left])
    qwen2.add_request(requests[0])
    (again,) = qwen2.step()
    assert same([as_response(again)], [plain_loop("qwen2", requests[0])])


@pytest.mark.usefixtures("backend")
def test_it_stays_ready_while_it_serves() -> None:
    """Weights stay packed between requests; a later request may be longer than all before."""
    qwen2 = generator("qwen2", 4)
    first, long = requests_for([0])[0], replace(requests_for([1])[0], prompt=PROMPTS[1] * 20)
    with qwen2.serving(2, len(long.prompt) + long.room):
        qwen2.add_request(first)
        one = qwen2.step()
        running = qwen2._running
        assert running
        assert not qwen2.has_unfinished
        assert qwen2.step() == []
        qwen2.add_request(long)
        two = qwen2.step()
        assert qwen2._running is running
    assert not qwen2._running
    assert same([as_response(c) for c in one + two], [plain_loop("qwen2", first), plain_loop("qwen2", long)])
