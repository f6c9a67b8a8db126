"""Several batches in threads generate what one would; a failure in one of them ends them all."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field

import pytest
import torch

from distflow import cpu
from distflow.cpu import threaded_batches
from distflow.cpu.threaded_batches import ThreadedBatches, share_threads
from distflow.rollout.builtin.sequence import Sequence
from distflow.rollout.engine import Request
from rollout.plain_loop import (
    EVERYBODY,
    PARAMS,
    SEED,
    complete,
    expected,
    generate,
    generator,
    generator_for,
    same,
)
from tiny import VOCABULARY, pair


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes one sequence enough for a batch."""
    monkeypatch.setattr(threaded_batches, "_MIN_SEQUENCES", 1)
    monkeypatch.setattr(threaded_batches, "_MIN_WITH_KERNELS", 1)


@pytest.mark.parametrize("max_batches", [2, 3, 100])
@pytest.mark.usefixtures("backend", "small_batches")
def test_batches_in_threads_generate_what_one_would(max_batches: int) -> None:
    qwen3 = generator("qwen3", 12, cache_tokens=1000, max_batches=max_batches)
    threads_before = torch.get_num_threads()
    for samples in (EVERYBODY, range(5)):
        assert same(generate(qwen3, samples), expected("qwen3", samples))
        assert len(qwen3.caches) == min(max_batches, 12, len(samples))
        assert sum(c.longest for c in qwen3.caches) <= 1000
    assert generate(qwen3, []) == []
    assert torch.get_num_threads() == threads_before


@pytest.mark.usefixtures("backend", "small_batches")
def test_a_failure_in_a_thread_is_raised_and_the_weights_stay_as_they_were() -> None:
    model = deepcopy(pair("qwen3").ours)
    qwen3 = generator_for(model, 12, max_batches=3)
    threads_before, before = torch.get_num_threads(), deepcopy(model.state_dict())
    requests = [Request(i, (1,), PARAMS, SEED) for i in range(8)] + [Request(8, (VOCABULARY + 1,), PARAMS, SEED)]
    with pytest.raises(IndexError):
        complete(qwen3, requests)
    assert torch.get_num_threads() == threads_before
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert not any(t.name.startswith("batch") for t in threading.enumerate())
    assert not qwen3.has_unfinished
    assert same(generate(qwen3), expected("qwen3"))


def test_a_batch_has_to_be_worth_its_reads_of_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    model = pair("qwen2").ours
    with threads(4):
        for n, count in ((0, 1), (8, 1), (16, 2), (31, 3), (32, 4), (10_000, 4)):
            assert share_threads(model, 4, n) == (count, 4 // count)
        assert share_threads(model, 1, 10_000) == (1, 4)
        monkeypatch.setattr(cpu, "_kernels", lambda: None)
        for n, share in ((0, (1, 4)), (127, (1, 4)), (128, (2, 2)), (255, (3, 1)), (10_000, (4, 1))):
            assert share_threads(model, 4, n) == share
        assert share_threads(model, 9, 10_000) == (9, 1)


def test_a_model_that_may_not_be_reentrant_has_one_batch() -> None:
    with threads(2):
        assert share_threads(pair("gemma2").ours, 4, 10_000) == (1, 2)


@dataclass
class FakeBatch:
    """Finishes one sequence per step."""

    sequences: list[Sequence] = field(default_factory=list)
    added: list[list[int]] = field(default_factory=list)
    threads: set[int] = field(default_factory=set)  # torch's, as the batch sees them

    @property
    def has_unfinished(self) -> bool:
        return bool(self.sequences)

    @property
    def unfinished(self) -> list[Sequence]:
        return self.sequences

    def add(self, sequences: list[Sequence]) -> None:
        self.added.append([s.request.sample_id for s in sequences])
        self.sequences += sequences

    def step(self, wake: Callable[[], bool]) -> list[Sequence]:
        self.threads.add(torch.get_num_threads())
        one = self.sequences.pop(0)
        if one.request.sample_id < 0:
            raise RuntimeError("on purpose")
        return [one]


def sequences(prompts: str, first: int = 0) -> list[Sequence]:
    """One per letter, which is its prompt."""
    return [Sequence(Request(first + i, (ord(p),), PARAMS, SEED)) for i, p in enumerate(prompts)]


def test_sequences_are_dealt_out_evenly_and_by_prompt() -> None:
    with ThreadedBatches([FakeBatch() for _ in range(3)], 1) as three:
        three.add(sequences("abacbacb"))
        three.add(sequences("a", first=8))
        three.add([])
        assert [b.added for b in three.batches] == [[[0, 2, 5]], [[1, 4, 7]], [[3, 6], [8]]]  # type: ignore[attr-defined]


def test_every_sequence_is_returned_once_and_batches_share_the_threads() -> None:
    batches = [FakeBatch(), FakeBatch()]
    with threads(4), ThreadedBatches(batches, 2) as two:
        two.add(sequences("abcdefg"))
        finished: list[int] = []
        while two.has_unfinished:
            if len(finished) in (2, 3):
                two.add(sequences("hi", first=10 * len(finished)))
            some = two.step()
            assert some
            finished += [s.request.sample_id for s in some]
        assert len(finished) == len(set(finished)) >= 9
        assert set(range(7)) < set(finished)
        assert [b.threads for b in batches] == [{2}, {2}]


def test_threads_that_start_later_have_all_of_the_threads() -> None:
    """A thread begins with the number of torch's threads that any thread has set last."""
    started: list[int] = []
    with threads(4):
        with ThreadedBatches([FakeBatch(), FakeBatch()], 2) as two:
            two.add(sequences("ab"))
            while two.has_unfinished:
                two.step()
        late = threading.Thread(target=lambda: started.append(torch.get_num_threads()))
        late.start()
        late.join()
        assert started == [4]
        assert torch.get_num_threads() == 4


def test_a_failure_in_a_thread_is_raised_by_step() -> None:
    with ThreadedBatches([FakeBatch(), FakeBatch()], 2) as two:
        two.add(sequences("a", first=-1))
        with pytest.raises(RuntimeError, match="on purpose"):
            two.step()
