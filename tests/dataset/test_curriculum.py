"""Which rows a step has: ratios of sources, rows that are dropped, the same for everybody and after a resume."""

import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from distflow.config.schema import CurriculumConfig, DataConfig
from distflow.dataset.curriculum import Curriculum, sources_of_rows
from distflow.dataset.loader import Loader
from distflow.errors import DataError

SOURCES = {"easy": 30, "middle": 20, "hard": 10}
STEPS = 12
Row = dict[str, Any]


class Numbers:
    column_names: tuple[str, ...] = ("row",)

    def __len__(self) -> int:
        return sum(SOURCES.values())

    def __getitem__(self, i: int, /) -> Row:
        return {"row": i}


def make(ratios: tuple[float, ...] = (3, 2, 1), batch: int = 8, seed: int = 4, **options: Any) -> Curriculum:
    source_of = np.repeat(np.arange(3), list(SOURCES.values()))
    return Curriculum(source_of, dict(zip(SOURCES, ratios, strict=True)), batch, seed, **options)


def results(curriculum: Curriculum, step: int, rates: tuple[float, ...]) -> NDArray[np.float64]:
    """What four responses to each row would do, if those of a source passed at this rate."""
    passed = np.array([4 * rates[i] for i in curriculum.draw(step).sources])
    return np.stack((np.full(curriculum.batch, 4.0), passed, passed))


def play(curriculum: Curriculum, rates: tuple[float, ...], steps: range = range(STEPS)) -> list[list[int]]:
    rows = []
    for step in steps:
        rows.append(curriculum.draw(step).rows.tolist())
        curriculum.learn(step, results(curriculum, step, rates))
    return rows


@given(st.tuples(*[st.floats(0.01, 10)] * 3), st.integers(1, 40), st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_sources_keep_their_ratios(ratios: tuple[float, ...], batch: int, seed: int) -> None:
    curriculum, shares = make(ratios, batch, seed), np.array(ratios) / sum(ratios)
    drawn = np.zeros(3)
    for step in range(STEPS):
        draw = curriculum.draw(step)
        assert len(draw.rows) == batch
        assert (curriculum.source_of[draw.rows] == draw.sources).all()
        drawn += np.bincount(draw.sources, minlength=3)
        assert abs(drawn - (step + 1) * batch * shares).max() < 2  # whatever the step: not only in the long run


def test_every_row_of_a_source_once_per_epoch_of_it() -> None:
    seen = Counter(row for rows in play(make((1, 1, 2), batch=12), (0, 0, 0), range(10)) for row in rows)
    assert {seen[row] for row in range(30)} == {1}
    assert {seen[row] for row in range(30, 50)} == {1, 2}
    assert {seen[row] for row in range(50, 60)} == {6}


def test_workers_have_their_share_of_every_source() -> None:
    draw = make((2, 1, 1), batch=16).draw(0)
    for half in np.split(draw.sources, 2):
        assert np.bincount(half, minlength=3).tolist() == [4, 2, 2]


def test_one_source_is_the_plain_stream() -> None:
    curriculum = Curriculum(np.zeros(len(Numbers()), np.int64), {"data": 1.0}, 8, 4)
    plain, ours = (Loader(Numbers(), 8, 1, 4, curriculum=c) for c in (None, curriculum))
    for step in range(2 * STEPS):
        assert ours.load(step, 0, 1)[1] == plain.load(step, 0, 1)[1]


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_any_number_of_workers_loads_the_same(replicas: int) -> None:
    loader = Loader(Numbers(), 8, 2, 4, curriculum=make())
    for step in range(3):
        rows = [row for r in range(replicas) for row in loader.load(step, r, replicas)[1]["row"]]
        assert rows == np.repeat(make().draw(step).rows, 2).tolist()
    spanning = loader.load_range(5, 6, 0, 1)[1]["row"][::2]
    assert spanning == [*make().draw(0).rows[5:], *make().draw(1).rows[:3]]


def test_solved_and_unsolvable_prompts_are_dropped_some_steps_later() -> None:
    follow = CurriculumConfig(drop_solved=1.0, drop_unsolved=0.0, visits=1)
    rows = play(curriculum := make((1, 1, 1), batch=6, follow=follow, lag=2), (1.0, 0.5, 0.0))
    for step in range(2, STEPS):
        out = {row for earlier in rows[: step - 1] for row in earlier if not 30 <= row < 50}
        assert not out & set(rows[step])  # as the results of all steps up to two before say
    assert any(set(rows[0]) & set(later) for later in rows[2:])  # of the middle source, which is kept
    metrics = curriculum.metrics(STEPS - 1)
    assert metrics["source/easy/dropped"] == len({r for earlier in rows[: STEPS - 2] for r in earlier if r < 30})
    assert metrics["source/middle/dropped"] == 0
    assert (metrics["source/middle/pass_rate"], metrics["source/middle/score"]) == (0.5, 0.5)


def test_a_prompt_is_dropped_after_so_many_visits_in_a_row() -> None:
    follow = CurriculumConfig(drop_solved=1.0, visits=2)
    curriculum = make((1, 1, 6), batch=8, follow=follow, lag=1)
    visits, rate = Counter[int](), {0: (0.0, 0.0, 1.0), 4: (0.0, 0.0, 0.25)}
    out: set[int] = set()
    for step in range(STEPS):
        for row in curriculum.draw(step).rows.tolist():
            assert row not in out
            visits[row] += 1
        passed = rate.get(step, (0.0, 0.0, 1.0))
        curriculum.learn(step, results(curriculum, step, passed))
        for row in set(curriculum.draw(step).rows.tolist()) - set(range(50)):
            visits[row] = 0 if step == 4 else visits[row]
            out |= {row} if visits[row] == 2 else set()
    assert len(out) == 10


def test_ratios_follow_the_pass_rates() -> None:
    follow = CurriculumConfig(adapt=True, floor=0.1, memory=0.5)
    curriculum = make((1, 1, 1), batch=30, follow=follow)
    play(curriculum, (1.0, 0.5, 0.0), range(20))
    assert curriculum.draw(2).ratios == pytest.approx([1 / 12, 10 / 12, 1 / 12])  # the first results count whole
    assert np.bincount(curriculum.draw(19).sources, minlength=3).tolist() == pytest.approx([2.5, 25, 2.5], abs=1)


def test_when_all_is_solved_the_prompts_come_again(caplog: pytest.LogCaptureFixture) -> None:
    follow = CurriculumConfig(drop_solved=1.0)
    curriculum = make((1, 1, 1), batch=8, follow=follow, lag=1)
    rows = play(curriculum, (1.0, 1.0, 1.0), range(STEPS))
    assert all(len(set(r)) == 8 for r in rows)
    first = [row for r in rows[:7] for row in r]
    assert len(set(first)) == 56  # of 60: nothing twice, until fewer than a batch are left
    assert set(rows[7]) & set(first)
    assert "4 rows are left, fewer than a batch" in caplog.text


@pytest.mark.parametrize("at", [0, 1, 3, 7])
def test_a_resumed_run_draws_the_same(at: int) -> None:
    follow = CurriculumConfig(drop_solved=0.7, drop_unsolved=0.0, visits=2, adapt=True)
    rates = (0.75, 0.5, 0.0)

    def new() -> Curriculum:
        return make((1, 2, 1), batch=9, follow=follow, lag=3)

    want, interrupted = play(new(), rates), new()
    play(interrupted, rates, range(at))
    interrupted.draw(at + 1)  # prefetched, or begun early
    state = json.loads(json.dumps(interrupted.state(at)))
    resumed = new()
    resumed.restore(state)
    assert play(resumed, rates, range(at, STEPS)) == want[at:]
    assert json.loads(json.dumps(resumed.state(STEPS))) != state


def test_a_checkpoint_of_other_sources_is_refused() -> None:
    state = Curriculum(np.zeros(60, np.int64), {"data": 1.0}, 8, 4).state(0)
    with pytest.raises(DataError, match=r"60 rows of easy, middle, hard, .* written with 60 rows of data"):
        make().restore(state)


def test_a_source_without_rows_is_refused() -> None:
    with pytest.raises(DataError, match=r"data\.sources\.b: none of its rows can be used"):
        Curriculum(np.zeros(4, np.int64), {"a": 1.0, "b": 1.0}, 2, 0)


def test_rows_belong_to_the_source_of_their_file() -> None:
    assert sources_of_rows([2, 1], np.array([0, 0, 1, 2, 2])).tolist() == [0, 0, 0, 1, 1]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "give one of `files` and `sources`"),
        ({"files": ["a"], "sources": {"b": "c"}}, "give one of `files` and `sources`"),
        ({"files": ["a"], "curriculum": {}}, "it follows nothing"),
        ({"files": ["a"], "curriculum": {"adapt": True}}, "`curriculum.adapt` changes the ratios of several `sources`"),
        ({"files": ["a"], "curriculum": {"drop_solved": 0.5, "drop_unsolved": 0.5}}, "is not below drop_solved"),
        ({"sources": {"b": {"files": "c", "ratio": 0.0}}}, "greater than 0"),
    ],
)
def test_what_makes_no_sense_is_refused(data: Row, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataConfig.model_validate(data)
