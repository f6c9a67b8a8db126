"""The scheduler: who runs in which slot, what is prefilled together, and that nothing is lost or done twice."""

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.rollout.builtin.history import History, HistoryPages, history_share
from distflow.rollout.builtin.page_pool import PagePool
from distflow.rollout.builtin.scheduler import Scheduler
from distflow.rollout.builtin.sequence import Sequence
from distflow.rollout.engine import Request, SamplingParams

END = 99  # the stop token
Prompt = tuple[int, ...]


def sequence(sample_id: int, prompt: Prompt = (1,), max_tokens: int = 100) -> Sequence:
    params = SamplingParams(max_tokens, stop=frozenset({END}))
    return Sequence(Request(sample_id, prompt, params, seed=0))


def sequences(count: int, prompt: Prompt = (1,)) -> list[Sequence]:
    return [sequence(i, prompt) for i in range(count)]


def prompt(length: int, first: int = 0) -> Prompt:
    return tuple(range(first, first + length))


def scheduler_of(slots: int, prefill_tokens: int = 100) -> Scheduler:
    """A scheduler with pages for all."""
    return Scheduler(slots, prefill_tokens, PagePool(100 * slots, 8))


def ids(some: Iterable[Sequence]) -> list[int]:
    return [s.request.sample_id for s in some]


def admit(scheduler: Scheduler) -> list[list[list[int]]]:
    """The sample ids of each prefill batch, by prompt."""
    return [[ids(shared) for shared in batch] for batch in scheduler.admit()]


def finish(*some: Sequence) -> None:
    for s in some:
        s.append(END, 0.0)


def test_free_slots_are_given_in_order() -> None:
    scheduler = scheduler_of(3)
    scheduler.add(sequences(5))
    assert admit(scheduler) == [[[0, 1, 2]]]
    assert [s.slot for s in scheduler.running] == [0, 1, 2]
    assert ids(scheduler.waiting) == [3, 4]
    assert admit(scheduler) == []  # there is no free slot


@pytest.mark.parametrize(("slots", "threshold"), [(1, 1), (7, 1), (8, 1), (16, 2), (64, 8)])
def test_nothing_is_admitted_before_an_eighth_of_the_slots_is_free(slots: int, threshold: int) -> None:
    scheduler = scheduler_of(slots)
    scheduler.add(sequences(3 * slots))
    admit(scheduler)
    for free in range(1, threshold + 1):
        finish(scheduler.running[0])
        scheduler.retire()
        admitted = admit(scheduler)
        assert bool(admitted) == (free == threshold)
    assert len(scheduler.running) == slots


def test_the_last_waiting_sequences_are_admitted_as_soon_as_all_of_them_fit() -> None:
    scheduler = scheduler_of(64)
    scheduler.add(sequences(66))
    admit(scheduler)
    for admitted in ([], [[[64, 65]]]):
        finish(scheduler.running[0])
        scheduler.retire()
        assert admit(scheduler) == admitted


def test_sequences_with_the_same_prompt_are_prefilled_as_one() -> None:
    scheduler = scheduler_of(8)
    a, b = prompt(4), prompt(4, first=10)
    scheduler.add(sequence(i, (a, b, tuple(a))[i % 3]) for i in range(6))
    assert admit(scheduler) == [[[0, 2, 3, 5], [1, 4]]]


def test_prompts_of_one_length_are_prefilled_together() -> None:
    scheduler = scheduler_of(8, 10)
    lengths = (5, 2, 5, 2, 2)
    scheduler.add(sequence(i, prompt(n, first=10 * i)) for i, n in enumerate(lengths))
    assert admit(scheduler) == [[[1], [3], [4]], [[0], [2]]]


def test_a_prefill_batch_stays_within_its_budget_unless_one_prompt_exceeds_it() -> None:
    scheduler = scheduler_of(8, 10)
    scheduler.add(sequence(i, prompt(n, first=30 * i)) for i, n in enumerate((25, 6, 4, 7)))
    assert admit(scheduler) == [[[2], [1]], [[3]], [[0]]]


def test_a_shared_prompt_counts_once_in_the_budget() -> None:
    scheduler = scheduler_of(8, 10)
    a, b = prompt(5), prompt(5, first=10)
    scheduler.add(sequence(i, (a, b)[i // 3]) for i in range(6))
    assert admit(scheduler) == [[[0, 1, 2], [3, 4, 5]]]


def test_the_last_sequences_take_the_slots_of_finished_ones() -> None:
    scheduler = scheduler_of(6)
    everybody = sequences(6)
    scheduler.add(everybody)
    admit(scheduler)
    finish(everybody[0], everybody[3], everybody[5])
    assert ids(scheduler.retire()) == [0, 3, 5]
    assert ids(scheduler.running) == [4, 1, 2]
    assert [s.slot for s in scheduler.running] == [0, 1, 2]
    assert scheduler.retire() == []


def test_nothing_moves_if_the_last_ones_finish() -> None:
    scheduler = scheduler_of(4)
    everybody = sequences(4)
    scheduler.add(everybody)
    admit(scheduler)
    finish(*everybody[2:])
    assert scheduler.retire() == everybody[2:]
    assert ids(scheduler.running) == [0, 1]


@settings(deadline=None)
@given(st.integers(1, 20), st.integers(1, 12), st.integers(1, 5), st.integers(0, 40), st.data())
def test_every_sequence_is_returned_once_and_has_its_own_pages(
    slots: int, prefill_tokens: int, page: int, more_pages: int, data: st.DataObject
) -> None:
    """Whenever sequences are added, however long they are, and with as few pages as one of them needs.

    `cache` holds whose token each place of each page has, as the model would write it.
    """
    limit, longest = 12, 17
    pool = PagePool(-(-longest // page) + more_pages, page)
    scheduler = Scheduler(slots, prefill_tokens, pool)
    added: list[Sequence] = []
    finished: list[Sequence] = []
    cache: dict[tuple[int, int], tuple[int, int]] = {}

    def write(s: Sequence, position: int) -> None:
        cache[s.pages[position // page], position % page] = s.request.sample_id, position

    def check(s: Sequence, length: int) -> None:
        for t in range(length):
            assert cache[s.pages[t // page], t % page] == (s.request.sample_id, t)

    arrivals = data.draw(st.lists(st.integers(0, 15), max_size=6), label="arrivals")
    while arrivals or scheduler.has_unfinished:
        new: list[Sequence] = []
        for _ in range(arrivals.pop() if arrivals else 0):
            text = prompt(data.draw(st.integers(1, 5)), first=data.draw(st.integers(0, 2)))
            new.append(sequence(len(added) + len(new), text, data.draw(st.integers(1, limit))))
        scheduler.add(new)
        added += new
        progress = False
        for batch in scheduler.admit():
            lengths = [len(shared[0].request.prompt) for shared in batch]
            assert sum(lengths) <= prefill_tokens or len(batch) == 1
            for shared in batch:
                assert len({s.request.prompt for s in shared}) == 1
                for s in shared:
                    assert not s.tokens
                    for t in range(len(s.request.prompt)):
                        write(s, t)
                    s.append(END if data.draw(st.booleans()) else 0, 0.0)
                    progress = True
        finished += scheduler.retire()
        if scheduler.running:
            ready, tables = scheduler.ready()
            assert len(scheduler.running) <= slots
            assert [s.slot for s in scheduler.running] == list(range(len(scheduler.running)))
            for s, row in zip(ready, tables, strict=True):
                assert row[: len(s.pages)].tolist() == s.pages
                write(s, s.length - 1)
                progress = True
            for s in ready:
                check(s, s.length)
                s.append(END if data.draw(st.booleans()) else 0, 0.0)
            finished += scheduler.retire()
        assert progress or not scheduler.has_unfinished  # some sequence always goes on
    assert sorted(ids(finished)) == ids(added)
    assert sorted(pool._free) == list(range(pool.pages))  # all were given back, once


@settings(deadline=None)
@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 4), st.integers(0, 30), st.data())
def test_conversations_come_to_an_end_and_find_their_histories(
    slots: int, page: int, open_at_once: int, more_pages: int, data: st.DataObject
) -> None:
    """Whatever is kept, some sequence always goes on, and what a sequence finds in its history is its own beginning.

    Conversations of several turns, in branches that are cut somewhere, some with two requests at once, some that end
    while a request runs. `cache` holds the token and the position that each place of each page has.
    """
    longest, turns = 24, data.draw(st.integers(1, 5), label="turns")
    pages = -(-longest // page) + more_pages
    share = history_share(pages, -(-longest // page), open_at_once)
    pool = PagePool(pages - open_at_once * share, page)
    scheduler = Scheduler(slots, 8, pool, HistoryPages(pool.pages, open_at_once, share))
    cache: dict[tuple[int, int], tuple[int, int]] = {}
    histories: dict[int, History] = {}
    left = dict.fromkeys(range(6), turns)  # turns of each sample
    running: dict[int, list[Sequence]] = {}
    done: dict[int, list[int]] = {}  # all tokens of a sample's latest turn

    def write(s: Sequence, position: int) -> None:
        token = [*s.request.prompt, *s.tokens][position]
        cache[s.pages[position // page], position % page] = token, position

    def check(s: Sequence, length: int) -> None:
        for t, token in enumerate([*s.request.prompt, *s.tokens][:length]):
            assert cache[s.pages[t // page], t % page] == (token, t)

    def say(s: Sequence) -> None:
        s.append(END if data.draw(st.booleans()) else data.draw(st.integers(0, 3)), 0.0)

    def ask(sample: int) -> None:
        history = histories.setdefault(sample, History())
        old = done.get(sample, [])
        cut = old[: data.draw(st.integers(0, len(old)))] if data.draw(st.booleans()) else old
        for _ in range(data.draw(st.sampled_from([1, 1, 1, 2]))):
            new = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))
            text = (*cut, *new)[: longest - 1]
            params = SamplingParams(longest, stop=frozenset({END}))
            room = data.draw(st.integers(1, longest - len(text)))
            s = Sequence(Request(sample, text, params, 0, max_tokens=room, keep=True), history)
            running.setdefault(sample, []).append(s)
        scheduler.add(running[sample])

    def leave(sequences: list[Sequence]) -> None:
        for s in sequences:
            sample = s.request.sample_id
            if s in running.get(sample, []):
                running[sample].remove(s)
                done[sample] = [*s.request.prompt, *s.tokens]

    while left or scheduler.has_unfinished:
        for sample in list(left):
            if sample not in histories and len(histories) == open_at_once:
                continue
            idle = not running.get(sample)
            if idle and left[sample]:
                left[sample] -= 1
                ask(sample)
            elif idle or data.draw(st.sampled_from([False] * 9 + [True])):  # over, maybe in the middle of a turn
                for s in running.pop(sample, []):
                    s.aborted = True
                histories.pop(sample).closed = True
                del left[sample]
        progress = not scheduler.has_unfinished
        for batch in scheduler.admit():
            for shared in batch:
                for s in shared:
                    check(s, s.reused)
                    for t in range(s.reused, len(s.request.prompt)):
                        write(s, t)
                    say(s)
                    progress = True
        retired = scheduler.retire()
        progress |= bool(retired)
        leave(retired)
        if scheduler.running:
            ready, tables = scheduler.ready()
            for s, row in zip(ready, tables, strict=True):
                assert row[: len(s.pages)].tolist() == s.pages
                write(s, s.length - 1)
                progress = True
            for s in ready:
                check(s, s.length)
                say(s)
            leave(scheduler.retire())
        assert progress or not scheduler.has_unfinished
    assert sorted(pool._free) == list(range(pool.pages))


def test_the_oldest_goes_on_while_others_wait_for_its_pages() -> None:
    scheduler = Scheduler(8, 100, PagePool(5, 4))
    old, young = sequence(0, prompt(4), max_tokens=9), sequence(1, prompt(4, first=9), max_tokens=9)
    scheduler.add([old, young])
    list(scheduler.admit())
    assert scheduler.running == [old, young]  # with a page each; the old one may need three more
    for s in (old, young):
        s.append(0, 0.0)
    assert scheduler.ready()[0] == [old]
    finish(old)
    assert scheduler.retire() == [old]
    assert scheduler.ready()[0] == [young]


def test_who_waits_is_admitted_when_there_are_pages_for_it_and_for_the_oldest() -> None:
    scheduler = Scheduler(8, 100, PagePool(5, 4))
    everybody = [sequence(i, prompt(4, first=9 * i), max_tokens=9) for i in range(3)]
    scheduler.add(everybody)
    list(scheduler.admit())
    assert scheduler.running == everybody[:2]
    finish(everybody[0])
    scheduler.retire()
    list(scheduler.admit())
    assert scheduler.running == everybody[1:]
