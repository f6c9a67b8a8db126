"""The rollout engine says what a plain loop without a cache would: whoever else is in the batch, however it is cut."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import cache as once
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import AutoModelForCausalLM, PreTrainedModel

from distflow.engine import cpu
from distflow.engine.cpu.llama_forward import Compiled
from distflow.engine.model import attention
from distflow.engine.model.attention import Attention, Packed
from distflow.engine.model.llama_family import FAMILY, matrices, together
from distflow.engine.model.source import kv_bytes
from distflow.engine.rollout import builtin as rollout
from distflow.engine.rollout import kv_cache as cache
from distflow.engine.rollout.builtin import Agree, Completions, Rollout
from distflow.engine.rollout.forward import Forward, Full, forward_of
from distflow.engine.rollout.llama_forward import Lean
from distflow.engine.rollout.sampling import Sampling, choose
from distflow.engine.weights import room
from distflow.errors import ConfigError
from engine.tiny import ARCHITECTURES, VOCABULARY, config_of, pair, with_weights_that_matter

SEED = 11
STOP = frozenset({2, 3, 4, 5, 6, 7})
HOW = Sampling(max_tokens=9, temperature=1.3, stop=STOP)

_draw = np.random.default_rng(0)
PROMPTS = [_draw.integers(0, VOCABULARY, n).tolist() for n in (3, 12, 1, 5, 5, 21, 2, 5)]
PROMPT_OF = np.array([1, 0, 5, 1, 2, 3, 1, 4, 6, 7, 5, 3, 1, 0])
IDS = np.array([100 + 3 * i for i in range(len(PROMPT_OF))])
EVERYBODY = range(len(IDS))

Said = tuple[list[int], list[float], bool]


def engine(arch: str, max_sequences: int = 64, tokens: int = 10_000, agree: Agree = lambda tokens: tokens) -> Rollout:
    """With a cache for so many tokens."""
    models = pair(arch)
    per_token = kv_bytes(models.config, torch.float32, 1)
    return Rollout(models.ours, per_token, tokens * per_token, max_sequences, agree=agree)


@once
def plainly(arch: str, prompt: tuple[int, ...], sample: int, how: Sampling, seed: int) -> Said:
    """Token after token, each from a pass over all that was said so far."""
    said: list[int] = []
    logprobs: list[float] = []
    while len(said) < how.max_tokens and not (said and said[-1] in how.stop):
        logits = pair(arch).alone([*prompt, *said])[-1:]
        token, logprob = choose(logits, how, seed, np.array([sample]), np.array([len(said)]))
        said.append(int(token))
        logprobs.append(float(logprob))
    return said, logprobs, said[-1] in how.stop


def expected(arch: str, how: Sampling = HOW, samples: Sequence[int] = EVERYBODY, seed: int = SEED) -> list[Said]:
    return [plainly(arch, tuple(PROMPTS[PROMPT_OF[i]]), int(IDS[i]), how, seed) for i in samples]


def rows(done: Completions) -> list[Said]:
    assert len(done.tokens) == len(done.logprobs) == len(done.finished)
    return [
        (t.tolist(), lp.tolist(), bool(f)) for t, lp, f in zip(done.tokens, done.logprobs, done.finished, strict=True)
    ]


def generate(made: Rollout, how: Sampling = HOW, samples: Sequence[int] = EVERYBODY, seed: int = SEED):
    index = np.array(samples, np.int64)
    return rows(made.generate(PROMPTS, PROMPT_OF[index], IDS[index], how, seed))


def same(got: list[Said], want: list[Said]) -> bool:
    return len(got) == len(want) and all(
        a[0] == b[0] and a[1] == pytest.approx(b[1], abs=1e-4) and a[2] == b[2] for a, b in zip(got, want, strict=True)
    )


@pytest.fixture(params=["compiled", "plain"])
def by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """In one thread, which is where there are kernels; and without them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    if request.param == "plain":
        monkeypatch.setattr(cpu, "_compiled", lambda: None)
    yield request.param
    torch.set_num_threads(threads)


@contextmanager
def passes() -> Iterator[dict[str, list[int]]]:
    """How many tokens each pass through the model computes."""
    seen: dict[str, list[int]] = {"Prefill": [], "Decode": []}

    def told(model: PreTrainedModel) -> Forward:
        forward = forward_of(model)

        class Told:
            ready = staticmethod(forward.ready)

            def __call__(self, tokens: Tensor, positions: Tensor, attention: Attention, keep: Tensor | None) -> Tensor:
                seen[type(attention).__name__].append(len(tokens))
                return forward(tokens, positions, attention, keep)

        return Told()

    with patch.object(rollout, "forward_of", told):
        yield seen


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.usefixtures("by")
def test_it_says_what_a_plain_loop_says_in_a_batch_of_any_size(arch: str) -> None:
    want = expected(arch)
    assert len({len(tokens) for tokens, _, _ in want}) > 3  # they end at different times
    for max_sequences in (1, 3, 8, 64):
        assert same(generate(engine(arch, max_sequences)), want), max_sequences


@pytest.mark.parametrize("lanes", [2, 3, 100])
@pytest.mark.usefixtures("by")
def test_lanes_say_what_one_would(lanes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout, "_LANE", 1)
    models = pair("qwen3")
    per_token = kv_bytes(models.config, torch.float32, 1)
    made = Rollout(models.ours, per_token, 1000 * per_token, 12, lanes=lanes)
    threads = torch.get_num_threads()
    for samples in (EVERYBODY, range(5)):
        assert same(generate(made, samples=samples), expected("qwen3", samples=samples))
        assert len(made._caches) == min(lanes, 12, len(samples))
        assert sum(c.slots for c in made._caches) <= 12
    assert generate(made, samples=[]) == []
    assert torch.get_num_threads() == threads


@pytest.mark.usefixtures("by")
def test_a_failure_in_a_lane_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout, "_LANE", 1)
    models = pair("qwen3")
    made = Rollout(models.ours, 1, 1 << 30, 12, lanes=3)
    threads, weights = torch.get_num_threads(), deepcopy(models.ours.state_dict())
    with pytest.raises(IndexError):
        made.generate([[1], [VOCABULARY + 1]], np.array([0] * 8 + [1]), np.arange(9), HOW, SEED)
    assert torch.get_num_threads() == threads
    assert all(torch.equal(t, weights[name]) for name, t in models.ours.state_dict().items())  # as they were


def test_a_model_that_is_not_known_has_one_lane() -> None:
    assert Rollout(pair("gemma2").ours, 1, 1 << 20, 8, lanes=4).lanes == 1


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_reading_the_cache_in_blocks_says_the_same(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_CALL", 0)
    monkeypatch.setattr(cache, "_SMALLEST", 1)
    assert same(generate(engine(arch, 8)), expected(arch))


@given(st.lists(st.integers(1, 200), min_size=1, max_size=200), st.sampled_from([0, 40, 512]))
@settings(deadline=None)
def test_blocks_cover_the_slots_and_read_no_more_than_one_would(lengths: list[int], call: int) -> None:
    with patch.object(cache, "_CALL", call):
        cost, blocks = cache._cut(np.array(lengths), 0, len(lengths))
    assert [i for lo, hi in blocks for i in range(lo, hi)] == list(range(len(lengths)))
    assert cost == sum((hi - lo) * max(lengths[lo:hi]) + call for lo, hi in blocks)
    assert cost <= len(lengths) * max(lengths) + call


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("vocabulary", [VOCABULARY, 64])  # the second fits a kernel
def test_the_short_way_through_a_model_gives_what_its_own_modules_give(arch: str, vocabulary: int, by: str) -> None:
    config = config_of(arch, vocab_size=vocabulary)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME, dtype=torch.float32)
    with_weights_that_matter(model)
    before = deepcopy(model.state_dict())
    lengths = [9, 9, 4, 1]
    tokens, positions = torch.arange(3, 26), torch.cat([torch.arange(n) for n in lengths])
    short: type = {"compiled": Compiled, "plain": Lean}[by]
    for keep in (None, torch.tensor([8, 17, 21, 22])):
        with torch.inference_mode():
            want = Full(model)(tokens, positions, Packed(lengths), keep)
            forward = forward_of(model)
            assert isinstance(forward, short if arch in FAMILY else Full)
            with forward.ready():
                got = forward(tokens, positions, Packed(lengths), keep)
        assert got.shape == want.shape == (4 if keep is not None else 23, vocabulary)
        assert torch.allclose(got, want, atol=3e-5)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())  # as they were


def test_a_model_whose_matrices_do_not_fit_the_kernels_goes_the_other_way(by: str) -> None:
    def way(**changes: Any) -> type:
        return type(forward_of(AutoModelForCausalLM.from_config(config_of("llama", **changes), dtype=torch.float32)))

    assert way() is {"compiled": Compiled, "plain": Lean}[by]
    scaled = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    for changes in ({"intermediate_size": 50}, {"hidden_act": "gelu"}, {"rope_parameters": scaled}):
        assert way(**changes) is Lean, changes
    torch.set_num_threads(2)
    assert way() is Lean


@pytest.mark.parametrize(
    "how",
    [
        replace(HOW, temperature=0.0),
        replace(HOW, max_tokens=1),
        replace(HOW, min_tokens=6),
        replace(HOW, top_k=5, top_p=0.8),
        replace(HOW, temperature=0.7, top_p=0.6),
        replace(HOW, stop=frozenset()),
    ],
    ids=["greedy", "one token", "not too short", "top-k and top-p", "top-p", "no stop"],
)
def test_every_way_of_sampling_is_that_of_a_plain_loop(how: Sampling) -> None:
    assert same(generate(engine("gemma2", 4), how), expected("gemma2", how))


def test_a_response_ends_with_the_first_stop_token_or_at_the_limit() -> None:
    got = generate(engine("llama", 3))
    assert {finished for _, _, finished in got} == {True, False}
    for tokens, logprobs, finished in got:
        assert len(tokens) == len(logprobs)
        assert not STOP & set(tokens[:-1])
        assert finished == (tokens[-1] in STOP)
        assert finished or len(tokens) == HOW.max_tokens


def test_a_stop_token_in_the_last_place_is_an_end_of_its_own() -> None:
    got = generate(engine("llama"), replace(HOW, max_tokens=1))
    assert {finished for _, _, finished in got} == {True, False}
    assert all(finished == (tokens[0] in STOP) for tokens, _, finished in got)


def test_no_response_ends_before_min_tokens() -> None:
    short = generate(engine("llama"))
    long = generate(engine("llama"), replace(HOW, min_tokens=5))
    assert min(len(tokens) for tokens, _, _ in short) < 5
    assert min(len(tokens) for tokens, _, _ in long) > 5  # a stop token comes after five others
    assert all(not STOP & set(tokens[:5]) for tokens, _, _ in long)


def test_the_likeliest_tokens_do_not_depend_on_the_seed() -> None:
    greedy = replace(HOW, temperature=0.0)
    made = engine("qwen2")
    assert same(generate(made, greedy, seed=1), generate(made, greedy, seed=2))
    assert not same(generate(made, seed=1), generate(made, seed=2))


def test_the_order_of_samples_does_not_matter() -> None:
    want = generate(engine("qwen2", 4))
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(len(IDS)).tolist()
        assert same(generate(engine("qwen2", 4), samples=order), [want[i] for i in order])


def test_the_others_in_the_batch_do_not_matter() -> None:
    want = generate(engine("gemma2", 4))
    for samples in ([2], [0, 3, 6, 12], [13, 4], list(range(0, 14, 3))):
        assert same(generate(engine("gemma2", 4), samples=samples), [want[i] for i in samples])


def test_the_name_of_a_prompt_does_not_matter() -> None:
    """The same prompt given twice is like two samples of one."""
    made = engine("mistral", 8)
    want = rows(made.generate([PROMPTS[1]], np.zeros(4, np.int64), IDS[:4], HOW, SEED))
    assert same(rows(made.generate([PROMPTS[1]] * 4, np.arange(4), IDS[:4], HOW, SEED)), want)
    assert len({tuple(tokens) for tokens, _, _ in want}) > 2


@pytest.mark.parametrize("arch", ["qwen2", "gemma2", "mistral"])
@pytest.mark.usefixtures("by")
def test_what_is_left_in_the_cache_does_not_matter(arch: str) -> None:
    made = engine(arch, 4)
    kept = None
    for call, samples in enumerate([[2, 10, 0, 5, 7], [4], EVERYBODY, [4, 8], [2], [1, 13, 6, 3, 12]]):
        assert same(generate(made, samples=samples), expected(arch, samples=samples)), call
        kept = kept or made._caches[0]
        with torch.inference_mode():
            for keys, values in made._caches[0].layers.values():
                keys.fill_(1e4)  # as bad as stale values get
                values.fill_(-1e4)
    assert made._caches[0] is kept  # it was used again, not made anew


def test_the_cache_grows_with_what_it_must_hold() -> None:
    made = engine("qwen2", 8)
    for samples in ([4], [4, 8], [2, 10], EVERYBODY):
        assert same(generate(made, samples=samples), expected("qwen2", samples=samples))
        longest = max(len(PROMPTS[PROMPT_OF[i]]) for i in samples) + HOW.max_tokens
        assert made._caches[0].longest >= longest
    assert made._caches[0].slots == 8


@pytest.mark.usefixtures("by")
def test_weights_may_change_between_calls() -> None:
    model = deepcopy(pair("qwen2").ours)
    made = Rollout(model, kv_bytes(model.config, torch.float32, 1), 1 << 22, 8)
    assert same(generate(made), expected("qwen2"))
    for module in list(model.modules()):  # new tensors in old modules
        for name, p in list(module.named_parameters(recurse=False)):
            setattr(module, name, torch.nn.Parameter(p.flip(0), requires_grad=False))
    model.tie_weights()
    after = generate(made)
    assert not same(after, expected("qwen2"))
    assert same(after, generate(Rollout(model, made.bytes_per_token, 1 << 22, 8)))


def side_by_side(model: PreTrainedModel) -> dict[str, Tensor]:
    """Its weights moved to where a generator would have them."""
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    made = room(shapes, together(model), torch.float32, torch.device("cpu"))
    for name, p in model.named_parameters():
        p.data = made[name].copy_(p.data)
    return made


@pytest.mark.parametrize("arch", ["qwen2", "llama", "qwen3", "mistral"])
def test_matrices_side_by_side_are_one(arch: str, by: str) -> None:
    model = deepcopy(pair(arch).ours)
    side_by_side(model)
    layer = Lean(model).layers[1]
    qkv, _, gate_up, _ = matrices(model.model.layers[1])
    for both, parts in ((layer.qkv, qkv), (layer.gate_up, gate_up)):
        assert both.weight is not None
        assert torch.equal(both.weight, torch.cat([p.weight for p in parts]))
        assert both.weight.data_ptr() == parts[0].weight.data_ptr()  # no copy
        assert both.weight.is_contiguous() == (by == "compiled")  # otherwise by columns
    assert Lean(pair(arch).ours).layers[1].qkv.weight is None
    assert same(generate(Rollout(model, kv_bytes(model.config, torch.float32, 1), 1 << 22, 8)), expected(arch))


def test_a_model_that_is_not_known_has_its_weights_one_by_one() -> None:
    assert list(together(pair("gemma2").ours)) == []


@pytest.mark.usefixtures("by")
def test_between_calls_the_memory_of_weights_may_be_taken_away() -> None:
    model = deepcopy(pair("qwen2").ours)
    made = side_by_side(model)
    engine = Rollout(model, kv_bytes(model.config, torch.float32, 1), 1 << 22, 8)
    generate(engine)
    kept = [StorageWeakRef(t.untyped_storage()) for t in made.values()]
    for p in model.parameters():
        p.data = torch.empty(0)
    del made
    gc.collect()
    assert all(storage.expired() for storage in kept)


def test_a_prompt_is_computed_once_for_all_of_its_samples() -> None:
    made = engine("qwen2", 64)
    with passes() as seen:
        made.generate([PROMPTS[5], PROMPTS[1]], np.arange(16) % 2, np.arange(16), replace(HOW, max_tokens=1), SEED)
    assert seen == {"Prefill": [len(PROMPTS[5]) + len(PROMPTS[1])], "Decode": []}


def test_a_freed_place_is_taken_by_who_waits() -> None:
    made, how = engine("qwen2", 3), replace(HOW, min_tokens=1)  # nobody leaves right after the prompt
    with passes() as seen:
        got = generate(made, how)
    assert sum(seen["Decode"]) == sum(len(tokens) - 1 for tokens, _, _ in got)
    full = [n == 3 for n in seen["Decode"]]
    assert all(full[: full.index(False)])
    assert not any(full[full.index(False) :])  # until nobody waits, every pass is full
    assert same(got, expected("qwen2", how))


def test_long_prompts_are_computed_in_several_passes() -> None:
    made = engine("gemma2", 64)
    made.prefill = 12
    with passes() as seen:
        got = generate(made, replace(HOW, max_tokens=1))
    assert max(seen["Prefill"]) == 21  # the one prompt that is longer than a pass should be, alone
    assert sorted(seen["Prefill"])[-2] <= 12
    assert sum(seen["Prefill"]) == sum(map(len, PROMPTS))
    assert same(got, expected("gemma2", replace(HOW, max_tokens=1)))
    assert same(generate(made), expected("gemma2"))


def test_the_memory_of_the_cache_bounds_the_batch() -> None:
    longest = 21 + HOW.max_tokens
    made = engine("llama", 64, tokens=2 * longest + 5)
    with passes() as seen:
        got = generate(made)
    held = sum(x.nbytes for layer in made._caches[0].layers.values() for x in layer)
    assert made._caches[0].slots == 2
    assert held <= made.cache_bytes
    assert max(seen["Decode"]) == 2
    assert same(got, expected("llama"))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_token_takes_the_memory_that_is_planned_for_it(arch: str) -> None:
    made = engine(arch, 4)
    generate(made)
    held = sum(x.nbytes for layer in made._caches[0].layers.values() for x in layer)
    assert held == made._caches[0].slots * made._caches[0].longest * made.bytes_per_token


def test_a_cache_that_holds_no_sequence_is_told() -> None:
    made = engine("llama", tokens=29)
    with pytest.raises(
        ConfigError, match=r"rollout\.kv_cache_gb: a sequence of 30 tokens needs .* lower rollout\.max_to"
    ):
        generate(made)
    assert same(generate(made, replace(HOW, max_tokens=8)), expected("llama", replace(HOW, max_tokens=8)))


def test_nothing_to_say_is_no_trouble() -> None:
    nobody = np.empty(0, np.int64)
    done = engine("llama").generate([], nobody, nobody, HOW, SEED)
    assert len(done.tokens) == len(done.logprobs) == len(done.finished) == 0


def test_replicas_go_on_with_what_they_agreed_on() -> None:
    """The tokens of another replica count: the model goes on from them, and they are the response."""
    made = engine("qwen2", 4, agree=lambda tokens: (tokens + 1) % VOCABULARY)
    for (tokens, _, finished), i in zip(generate(made), EVERYBODY, strict=True):
        prompt, said = PROMPTS[PROMPT_OF[i]], list[int]()
        while len(said) < HOW.max_tokens and not (said and said[-1] in STOP):
            logits = pair("qwen2").alone([*prompt, *said])[-1:]
            token, _ = choose(logits, HOW, SEED, IDS[i : i + 1], np.array([len(said)]))
            said.append((int(token) + 1) % VOCABULARY)
        assert tokens == said
        assert finished == (said[-1] in STOP)
