"""Conversations of later steps: begun, left alone, carried on or begun again, and budgets of a sample."""

import json
from collections.abc import Callable, Generator, Mapping
from typing import Any, cast

import pytest

from agents.fake_env_pool import FakeEnvPool, Script
from agents.test_conversations_loop import SEED, FakeEngine, content, talk, text
from distflow.agents.choice import group_seed
from distflow.agents.conversation import Sample
from distflow.agents.conversations import Ahead, Begun, Conversations
from distflow.agents.converse import converse
from distflow.agents.record import ConversationRecord, columns
from distflow.agents.rendering import Renderer
from distflow.agents.runtime import EnvironmentRuntime
from distflow.agents.session import ConversationLimits
from distflow.rollout.engine import SamplingParams

LIMITS = ConversationLimits(max_turns=4, max_tokens=48, turn_tokens=6)
COUNT = 4  # samples of a step
Delay = Callable[[int, int], int]


def sample(i: int, step: int) -> Sample:
    return Sample(i, 0, f"prompt {i // 2}", {"more": "so" * (i % 3)}, group_seed(SEED, i), i // COUNT - step)


def have_step(
    step: int,
    pool: FakeEnvPool,
    begun: Mapping[int, Begun] | None = None,
    ahead: int = COUNT,
    turns: int = 1,
    limits: ConversationLimits = LIMITS,
    concurrent: int = 64,
    warm: int = 0,
) -> tuple[dict[int, ConversationRecord], dict[int, Begun], FakeEngine]:
    """Has the conversations of a step, with the weights of that version, and begins some of later steps."""
    engine = FakeEngine(version=step)
    runtime = EnvironmentRuntime("echo", Renderer(text()), limits, concurrent, warm=warm, turns_ahead=turns or 1)
    own = range(step * COUNT, (step + 1) * COUNT)
    later = Ahead([sample(i, step) for i in range(own.stop, own.stop + ahead)], turns > 0)
    params = SamplingParams(limits.max_tokens, stop=frozenset({text().tokenizer.eos_token_id, *range(70, 76)}))
    state = {"global_step": step, "max_steps": 9}
    samples = [sample(i, step) for i in own]
    all_begun = dict(begun or {})
    conversations = Conversations(samples, [runtime], pool, params, SEED, step, None, state, later, all_begun)
    records, _ = converse(cast(Any, engine), conversations, list(own), 200, concurrent)
    assert not engine.generator.has_unfinished
    return records, conversations.begun, engine


def have_steps(
    steps: int, delay: Delay = lambda key, number: 0, restart: bool = False, script: Script = talk, **options: Any
) -> dict[int, ConversationRecord]:
    """Has several steps; with `restart`, what was begun goes through a checkpoint and its environments are gone."""
    pool, records, begun = FakeEnvPool(script, delay), dict[int, ConversationRecord](), dict[int, Begun]()
    for step in range(steps):
        if restart:
            pool = FakeEnvPool(script, delay)
            begun = {i: Begun.of(json.loads(json.dumps(b.as_json()))) for i, b in begun.items()}
        last = {"ahead": 0} if step == steps - 1 else {}
        more, begun, _ = have_step(step, pool, begun, **options | last)
        records |= more
    assert not pool.running
    assert not begun
    return records


def test_a_conversation_goes_on_with_the_weights_of_its_own_step() -> None:
    records = have_steps(3)
    for i, record in records.items():
        own = i // COUNT
        sampled = [v for v, mine in zip(record.versions, record.mask, strict=True) if mine]
        assert [v >= 0 for v in record.versions] == [bool(m) for m in record.mask]
        assert sampled == sorted(sampled)
        assert set(sampled) == ({own - 1, own} if own and record.turns > 1 else {max(0, own - 1)})
        assert sampled.count(own - 1) <= 6  # one turn, and no more
        assert record.weight_version == sampled[0]
        assert not record.diverged
    assert any(r.turns > 1 for i, r in records.items() if i >= COUNT)
    made = columns([records[i] for i in sorted(records)], text())
    assert [v.tolist() for v in made["token_versions"]] == [records[i].versions for i in sorted(records)]


@pytest.mark.parametrize("turns", [1, 2])
def test_how_far_it_comes_does_not_depend_on_time(turns: int) -> None:
    want = have_steps(3, turns=turns)
    late = have_steps(3, lambda key, number: (key * 7 + number * 5) % 11, turns=turns)
    few = have_steps(3, turns=turns, concurrent=1)
    for other in (late, few):
        for i, record in want.items():
            assert content(other[i]) == content(record)
            assert other[i].versions == record.versions
    versions = [len(set(r.versions) - {-1}) for r in want.values()]
    assert max(versions) == 2


def test_after_a_restart_the_environment_is_told_what_was_said() -> None:
    want, again = have_steps(3, turns=2), have_steps(3, turns=2, restart=True)
    for i, record in want.items():
        assert content(again[i]) == content(record)
        assert (again[i].versions, again[i].logprobs) == (record.versions, record.logprobs)
        assert not again[i].diverged


def test_an_environment_that_does_not_repeat_itself_is_answered_anew() -> None:
    starts: list[int] = []

    def whimsical(start: Mapping[str, Any]) -> Generator[dict[str, Any], dict[str, Any], None]:
        starts.append(start["sample_id"])
        return talk({**start, "prompt": f"{start['prompt']} {starts.count(start['sample_id'])}"})

    records = have_steps(2, restart=True, script=whimsical)
    assert [i for i, r in sorted(records.items()) if r.diverged] == [*range(COUNT, 2 * COUNT)]
    for i in range(COUNT, 2 * COUNT):
        assert {v for v in records[i].versions if v >= 0} == {1}  # nothing that was said to another prompt


def test_a_slow_environment_of_a_later_step_is_not_waited_for() -> None:
    slow = 1000
    pool = FakeEnvPool(talk, lambda key, number: slow if key == COUNT and number > 2 else 0)
    _, begun, _ = have_step(0, pool)
    assert sorted(begun) == [*range(COUNT, 2 * COUNT)]
    assert all(len(b.turns) == 1 for b in begun.values())
    assert any(left > slow / 2 for left, event in pool.pending if event.key == COUNT)


def test_what_has_ended_early_is_kept_for_its_step() -> None:
    def fails(start: Mapping[str, Any]) -> Generator[dict[str, Any], dict[str, Any], None]:
        if start["sample_id"] == COUNT + 1:
            raise RuntimeError("fell over")
        yield from talk(start)

    pool = FakeEnvPool(fails)
    records, begun, _ = have_step(0, pool)
    assert sorted(records) == [*range(COUNT)]
    record = begun[COUNT + 1].record
    assert record is not None
    assert record.failure == "fell over"
    records, _, _ = have_step(1, pool, begun, ahead=0)
    assert records[COUNT + 1].failure == "fell over"


def test_every_step_tells_its_environments_which_one_it_is() -> None:
    told: dict[int, int] = {}

    def note(start: Mapping[str, Any]) -> Generator[dict[str, Any], dict[str, Any], None]:
        told[start["sample_id"]] = start["trainer_state"]["global_step"]
        return talk(start)

    have_steps(3, script=note)
    assert told == {i: i // COUNT for i in range(3 * COUNT)}


@pytest.mark.parametrize("warm", [0, 2, 8])
def test_warm_environments_are_started_ahead_and_change_nothing(warm: int) -> None:
    want = have_steps(2, turns=0, ahead=0)
    pool = FakeEnvPool(talk)
    first, begun, _ = have_step(0, pool, turns=0, warm=warm, concurrent=2)
    assert sorted(begun) == [*range(COUNT, COUNT + min(warm, COUNT))]
    assert pool.forks == COUNT + len(begun)
    assert pool.most == min(COUNT, 2 + warm) or warm > COUNT
    second, _, engine = have_step(1, pool, begun, ahead=0)
    assert pool.forks == 2 * COUNT
    assert {r.sample_id for r in engine.requests} == set(second)
    for i, record in {**first, **second}.items():
        assert content(record) == content(want[i])


def test_a_budget_of_tokens_ends_a_sample_with_what_it_has() -> None:
    free = have_steps(1, ahead=0)
    records = have_steps(1, ahead=0, limits=ConversationLimits(4, 48, 6, sample_tokens=8))
    for i, record in records.items():
        sampled = sum(record.mask)
        assert sampled <= 8
        assert record.tokens == free[i].tokens[: len(record.tokens)] or free[i].turns == record.turns
        assert record.reward == sum(record.turn_rewards)
        cut = sum(free[i].mask) > sampled
        assert (record.limit == "sample_tokens") == cut or sampled == 8
        assert not (cut and record.finished)
    assert any(r.limit == "sample_tokens" for r in records.values())


def test_a_budget_of_time_ends_a_sample_with_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """The turn that is generated then is dropped; the first one is not."""
    now = [0.0]
    monkeypatch.setattr("distflow.agents.conversation.time.perf_counter", lambda: now[0])

    def ages(start: Mapping[str, Any]) -> Generator[dict[str, Any], dict[str, Any], None]:
        script, answer = talk(start), None
        while True:
            try:
                message = script.send(cast(Any, answer))
            except StopIteration:
                return
            now[0] += 1.0 if message["op"] == "turn" else 0.0
            answer = yield message

    limits = ConversationLimits(9, 48, 6, sample_seconds=2.5)
    records = have_steps(1, ahead=0, limits=limits, concurrent=1, script=ages)
    free = have_steps(1, ahead=0, limits=ConversationLimits(9, 48, 6), concurrent=1)
    over = [r for r in records.values() if r.limit == "sample_seconds"]
    assert over
    for record in over:
        assert 0 < record.turns < free[record.sample_id].turns
        assert record.tokens == free[record.sample_id].tokens[: len(record.tokens)]
        assert record.reward == sum(record.turn_rewards)
        assert not record.finished
