"""The scheduler: who runs in which slot, what is prefilled together, and that nothing is lost or done twice."""

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.engine.rollout.engine import Request, SamplingParams
from distflow.engine.rollout.scheduler import Scheduler
from distflow.engine.rollout.sequence import Sequence

END = 99  # the stop token
Prompt = tuple[int, ...]


def sequence(sample_id: int, prompt: Prompt = (1,), max_tokens: int = 100) -> Sequence:
    params = SamplingParams(max_tokens, stop=frozenset({END}))
    return Sequence(Request(sample_id, prompt, params, seed=0))


def sequences(count: int, prompt: Prompt = (1,)) -> list[Sequence]:
    return [sequence(i, prompt) for i in range(count)]


def prompt(length: int, first: int = 0) -> Prompt:
    return tuple(range(first, first + length))


def ids(some: Iterable[Sequence]) -> list[int]:
    return [s.request.sample_id for s in some]


def admit(scheduler: Scheduler) -> list[list[list[int]]]:
    """The sample ids of each prefill batch, by prompt."""
    return [[ids(shared) for shared in batch] for batch in scheduler.admit()]


def finish(*some: Sequence) -> None:
    for s in some:
        s.append(END, 0.0)


def test_free_slots_are_given_in_order() -> None:
    scheduler = Scheduler(3, prefill_tokens=100)
    scheduler.add(sequences(5))
    assert admit(scheduler) == [[[0, 1, 2]]]
    assert [s.slot for s in scheduler.running] == [0, 1, 2]
    assert ids(scheduler.waiting) == [3, 4]
    assert admit(scheduler) == []  # there is no free slot


@pytest.mark.parametrize(("slots", "threshold"), [(1, 1), (7, 1), (8, 1), (16, 2), (64, 8)])
def test_nothing_is_admitted_before_an_eighth_of_the_slots_is_free(slots: int, threshold: int) -> None:
    scheduler = Scheduler(slots, prefill_tokens=100)
    scheduler.add(sequences(3 * slots))
    admit(scheduler)
    for free in range(1, threshold + 1):
        finish(scheduler.running[0])
        scheduler.retire()
        admitted = admit(scheduler)
        assert bool(admitted) == (free == threshold)
    assert len(scheduler.running) == slots


def test_the_last_waiting_sequences_are_admitted_as_soon_as_all_of_them_fit() -> None:
    scheduler = Scheduler(64, prefill_tokens=100)
    scheduler.add(sequences(66))
    admit(scheduler)
    for admitted in ([], [[[64, 65]]]):
        finish(scheduler.running[0])
        scheduler.retire()
        assert admit(scheduler) == admitted


def test_sequences_with_the_same_prompt_are_prefilled_as_one() -> None:
    scheduler = Scheduler(8, prefill_tokens=100)
    a, b = prompt(4), prompt(4, first=10)
    scheduler.add(sequence(i, (a, b, tuple(a))[i % 3]) for i in range(6))
    assert admit(scheduler) == [[[0, 2, 3, 5], [1, 4]]]


def test_prompts_of_one_length_are_prefilled_together() -> None:
    scheduler = Scheduler(8, prefill_tokens=10)
    lengths = (5, 2, 5, 2, 2)
    scheduler.add(sequence(i, prompt(n, first=10 * i)) for i, n in enumerate(lengths))
    assert admit(scheduler) == [[[1], [3], [4]], [[0], [2]]]


def test_a_prefill_batch_stays_within_its_budget_unless_one_prompt_exceeds_it() -> None:
    scheduler = Scheduler(8, prefill_tokens=10)
    scheduler.add(sequence(i, prompt(n, first=30 * i)) for i, n in enumerate((25, 6, 4, 7)))
    assert admit(scheduler) == [[[2], [1]], [[3]], [[0]]]


def test_a_shared_prompt_counts_once_in_the_budget() -> None:
    scheduler = Scheduler(8, prefill_tokens=10)
    a, b = prompt(5), prompt(5, first=10)
    scheduler.add(sequence(i, (a, b)[i // 3]) for i in range(6))
    assert admit(scheduler) == [[[0, 1, 2], [3, 4, 5]]]


def test_the_last_sequences_take_the_slots_of_finished_ones() -> None:
    scheduler = Scheduler(6, prefill_tokens=100)
    everybody = sequences(6)
    scheduler.add(everybody)
    admit(scheduler)
    finish(everybody[0], everybody[3], everybody[5])
    finished, movers, old_slots = scheduler.retire()
    assert ids(finished) == [0, 3, 5]
    assert ids(movers) == [4]
    assert old_slots == [4]
    assert ids(scheduler.running) == [4, 1, 2]
    assert [s.slot for s in scheduler.running] == [0, 1, 2]
    assert scheduler.retire() == ([], [], [])


def test_nothing_moves_if_the_last_ones_finish() -> None:
    scheduler = Scheduler(4, prefill_tokens=100)
    everybody = sequences(4)
    scheduler.add(everybody)
    admit(scheduler)
    finish(*everybody[2:])
    assert scheduler.retire() == (everybody[2:], [], [])
    assert ids(scheduler.running) == [0, 1]


@settings(deadline=None)
@given(st.integers(1, 20), st.integers(1, 12), st.data())
def test_slots_are_contiguous_and_every_sequence_is_returned_once(
    slots: int, prefill_tokens: int, data: st.DataObject
) -> None:
    """Whenever sequences are added and however long they are. `cache` holds whose keys and values each slot has."""
    scheduler = Scheduler(slots, prefill_tokens)
    added: list[Sequence] = []
    finished: list[Sequence] = []
    cache: dict[int, Sequence] = {}

    def retire() -> None:
        done, movers, old_slots = scheduler.retire()
        assert all(s.finished for s in done)
        for mover, old in zip(movers, old_slots, strict=True):
            assert cache[old] is mover
        cache.update({mover.slot: mover for mover in movers})
        finished.extend(done)
        check()

    def check() -> None:
        assert [s.slot for s in scheduler.running] == list(range(len(scheduler.running)))
        assert all(cache[s.slot] is s for s in scheduler.running)
        assert len(scheduler.running) <= slots

    arrivals = data.draw(st.lists(st.integers(0, 15), max_size=6), label="arrivals")
    while arrivals or scheduler.has_unfinished:
        new: list[Sequence] = []
        for _ in range(arrivals.pop() if arrivals else 0):
            text = prompt(data.draw(st.integers(1, 5)), first=data.draw(st.integers(0, 2)))
            new.append(sequence(len(added) + len(new), text, data.draw(st.integers(1, 6))))
        scheduler.add(new)
        added += new
        for batch in scheduler.admit():
            lengths = [len(shared[0].request.prompt) for shared in batch]
            assert sum(lengths) <= prefill_tokens or len(batch) == 1
            for shared in batch:
                assert len({s.request.prompt for s in shared}) == 1
                for s in shared:
                    assert not s.tokens
                    cache[s.slot] = s
                    s.append(END if data.draw(st.booleans()) else 0, 0.0)
        check()
        retire()
        for s in scheduler.running:
            s.append(END if data.draw(st.booleans()) else 0, 0.0)
        retire()
    assert sorted(ids(finished)) == ids(added)
