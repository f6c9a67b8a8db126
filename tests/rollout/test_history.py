"""Histories: a turn of a conversation computes what is new, and has the tokens it would have if all were computed."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distflow.cpu import threaded_batches
from distflow.rollout.builtin import generator as rollout_generator
from distflow.rollout.builtin.generator import Generator
from distflow.rollout.builtin.history import History, history_share
from distflow.rollout.engine import Completion, Request
from rollout.plain_loop import PARAMS, PROMPTS, SEED, Response, as_response, generator, passes, plain_loop, same

LONG = replace(PARAMS, max_tokens=60, stop=frozenset())
LONGEST, TURN = 90, 4
SAID = [(7, 8), (9,), (10, 11, 12)]  # what an environment says after each turn


def ask(
    engine: Generator, sample: int, prompt: Sequence[int], start: int, request_id: int = -1, room: int = TURN
) -> Request:
    request = Request(sample, tuple(prompt), LONG, SEED, len(prompt) - start, room, request_id, keep=True)
    engine.add_request(request)
    return request


def finish(engine: Generator) -> dict[int, Completion]:
    done: dict[int, Completion] = {}
    while engine.has_unfinished:
        done |= {c.request_id: c for c in engine.step()}
    return done


def alone(arch: str, request: Request) -> Response:
    return plain_loop(arch, replace(request, params=replace(LONG, max_tokens=request.position + request.room)))


def converse(engine: Generator, arch: str, samples: Sequence[int]) -> list[Completion]:
    """Has a conversation for each sample, all at once; every turn has the tokens that a plain loop gives."""
    completions: list[Completion] = []
    whole = {s: list(PROMPTS[s % len(PROMPTS)]) for s in samples}
    starts = {s: len(whole[s]) for s in samples}
    for said in SAID:
        requests = [ask(engine, s, whole[s], starts[s]) for s in samples]
        turns = finish(engine)
        assert same([as_response(turns[s]) for s in samples], [alone(arch, r) for r in requests])
        for s in samples:
            whole[s] += [*turns[s].tokens.tolist(), *said]
        completions += turns.values()
    return completions


@pytest.fixture(params=[1, 3])
def max_batches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(threaded_batches, "_MIN_SEQUENCES", 1)
    monkeypatch.setattr(threaded_batches, "_MIN_WITH_KERNELS", 1)
    return int(request.param)


@pytest.mark.parametrize("arch", ["qwen3", "gemma2", "mistral"])
@pytest.mark.usefixtures("backend")
def test_a_turn_computes_what_is_new(arch: str) -> None:
    engine, samples = generator(arch), range(4)
    with passes() as computed, engine.serving(4, LONGEST):
        converse(engine, arch, samples)
    assert sum(computed["Prefill"]) == sum(len(PROMPTS[s]) for s in samples)
    new = [1 + len(said) for said in SAID[:-1]]  # the newest token of a turn was never computed
    assert computed["Extension"] == [len(samples) * n for n in new]


@pytest.mark.usefixtures("backend")
def test_histories_may_be_in_any_batch_and_in_small_pages(max_batches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_generator, "PAGE", 3)
    engine = generator("qwen3", 5, max_batches=max_batches)
    with engine.serving(7, LONGEST):
        assert sum(c.reused for c in converse(engine, "qwen3", range(7)))
        assert len(engine.caches) == max_batches
        engine.forget(range(7))
        converse(engine, "qwen3", range(3, 10))  # others, in the pages of the first ones


@pytest.mark.parametrize("tokens", [LONGEST, 2 * LONGEST, 5 * LONGEST])
@pytest.mark.usefixtures("one_thread")
def test_a_small_cache_keeps_the_beginnings(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many tokens of each, however many of the others there are; and none where one conversation hardly fits."""
    monkeypatch.setattr(rollout_generator, "PAGE", 4)

    def reused(order: Sequence[int]) -> dict[int, list[int]]:
        engine = generator("qwen2", 3, cache_tokens=tokens)
        with engine.serving(8, LONGEST):
            turns = converse(engine, "qwen2", order)
        return {s: [c.reused for c in turns if c.sample_id == s] for s in order}

    share = history_share(-(-tokens // 4), -(-LONGEST // 4), 8) * 4
    all_of_them = reused(range(8))
    assert reused([5, 2]) == {s: all_of_them[s] for s in (5, 2)}
    assert max(max(n) for n in all_of_them.values()) == min(share, 21 + 2 * TURN + len(SAID[0]) - 1)
    assert (share > 0) == (tokens > LONGEST)


def first_turn(engine: Generator, sample: int, prompt: Sequence[int]) -> list[int]:
    ask(engine, sample, prompt, len(prompt))
    return [*prompt, *finish(engine)[sample].tokens.tolist()]


@pytest.mark.usefixtures("one_thread")
def test_a_branch_goes_on_where_it_left_the_other() -> None:
    engine, prompt = generator("qwen2"), PROMPTS[1]
    with engine.serving(2, LONGEST):
        whole = first_turn(engine, 3, prompt)
        ask(engine, 3, [*whole, 7, 8], len(prompt))
        assert finish(engine)[3].reused == len(whole) - 1
        other = ask(engine, 3, [*whole, 9], len(prompt))
        done = finish(engine)[3]
    assert done.reused == len(whole)  # by now, the newest token of the first turn is there, too
    assert same([as_response(done)], [alone("qwen2", other)])


@pytest.mark.usefixtures("one_thread")
def test_requests_of_a_sample_at_the_same_time_do_not_disturb_each_other() -> None:
    engine, prompt = generator("qwen2"), PROMPTS[1]
    with engine.serving(2, LONGEST):
        whole = first_turn(engine, 3, prompt)
        pair = [ask(engine, 3, [*whole, *said], len(prompt), 10 + i) for i, said in enumerate(SAID[:2])]
        done = finish(engine)
    assert sorted(done[r.id].reused for r in pair) == [0, len(whole) - 1]  # one of them goes on in the history
    assert same([as_response(done[r.id]) for r in pair], [alone("qwen2", r) for r in pair])


@pytest.mark.usefixtures("one_thread")
def test_an_aborted_request_leaves_a_history_that_is_right() -> None:
    engine, prompt = generator("qwen2"), PROMPTS[1]
    with engine.serving(2, LONGEST):
        whole = first_turn(engine, 3, prompt)
        ask(engine, 3, [*whole, 7, 8], len(prompt), 10, room=30)
        assert engine.step(wake=lambda: True) == []
        engine.abort([10])
        again = ask(engine, 3, [*whole, 7, 9], len(prompt), 11)
        done = finish(engine)[11]
    assert done.reused == len(whole) + 1
    assert same([as_response(done)], [alone("qwen2", again)])


@pytest.mark.usefixtures("one_thread")
def test_the_pages_of_a_sample_whose_request_was_aborted_go_to_the_next(max_batches: int) -> None:
    engine, prompt = generator("qwen2", max_batches=max_batches), PROMPTS[1]
    with engine.serving(1, LONGEST):
        for sample in range(3):
            ask(engine, sample, prompt, len(prompt), room=30)
            assert engine.step(wake=lambda: True) == []
            engine.abort([sample])
            engine.forget([sample])
        assert first_turn(engine, 9, prompt)
        ask(engine, 9, [*prompt, 1], len(prompt))
        assert finish(engine)[9].reused == len(prompt)


@pytest.mark.usefixtures("one_thread")
def test_only_as_many_are_kept_as_were_announced() -> None:
    engine, prompt = generator("qwen2"), PROMPTS[1]
    with engine.serving(1, LONGEST):
        first_turn(engine, 3, prompt)
        other = first_turn(engine, 4, prompt)
        late = ask(engine, 4, [*other, 7], len(prompt))
        done = finish(engine)[4]
        assert done.reused == 0
        assert same([as_response(done)], [alone("qwen2", late)])
    whole = first_turn(engine, 3, prompt)  # outside, where nothing is kept
    ask(engine, 3, [*whole, 7], len(prompt))
    assert finish(engine)[3].reused == 0


@given(st.lists(st.integers(0, 2), max_size=6), st.lists(st.integers(0, 2), min_size=1, max_size=6))
def test_a_history_shares_the_longest_beginning_but_the_last_token(tokens: list[int], prompt: list[int]) -> None:
    n = History(tokens=tokens).shared_with(prompt)
    assert n < len(prompt)
    assert tokens[:n] == prompt[:n]
    assert n == min(len(tokens), len(prompt) - 1) or tokens[n] != prompt[n]


@given(st.integers(1, 200), st.integers(1, 20), st.integers(1, 20))
def test_any_sequence_fits_beside_the_histories(pages: int, need: int, histories: int) -> None:
    share = history_share(pages, need, histories)
    assert share <= need
    assert not share or pages - histories * share >= need
    assert share == need or (histories + 1) * need > pages
