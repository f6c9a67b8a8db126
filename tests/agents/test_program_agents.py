"""Agents as programs, functions and coroutines, in real processes, against the endpoint and a scripted model."""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agents.families import renderer, sampled
from distflow.agents.conversation import Sample
from distflow.agents.conversations import Conversations
from distflow.agents.endpoint import Endpoint
from distflow.agents.env_pool import EnvPool
from distflow.agents.record import ConversationRecord
from distflow.agents.runtime import EnvironmentRuntime
from distflow.agents.session import ConversationLimits
from distflow.agents.spec import EnvironmentSetupError, EnvironmentSpec
from distflow.rollout.engine import Completion, Request, SamplingParams
from limits import TimeLimit

BASE = Path(__file__).parent
SPECS = [
    EnvironmentSpec("function", "scripted_agents.py:asks"),
    EnvironmentSpec("coroutine", "scripted_agents.py:asks_at_once"),
    EnvironmentSpec("program", command=["python", "scripted_agents.py"]),
    EnvironmentSpec("faulty", "scripted_agents.py:misbehaves"),
    EnvironmentSpec("hanging", "scripted_agents.py:misbehaves", time_limit_s=2),
]
VERSION = 3


class Worker:
    """EnvPool and an endpoint, as a worker keeps them; a model that says the same always."""

    def __init__(self) -> None:
        self.renderer = renderer("qwen")
        self.env_pool = EnvPool(SPECS, BASE, time_limit_s=60.0)
        self.descriptions = self.env_pool.describe()
        self.endpoint = Endpoint("tiny", len(self.renderer.tokenizer), max_calls=4)

    def converse(
        self, rows: Sequence[Mapping[str, Any]], environment: int, limits: ConversationLimits | None = None
    ) -> list[ConversationRecord]:
        runtimes = [
            EnvironmentRuntime(s.name, self.renderer, limits or ConversationLimits(8, 400), 64, needs_endpoint=True)
            for s in SPECS
        ]
        hangs = [row.get("what") == "hang" for row in rows]
        samples = [Sample(100 + i, environment + hangs[i], "Go.", row, seed=i) for i, row in enumerate(rows)]
        params = SamplingParams(400)
        loop = Conversations(samples, runtimes, self.env_pool, params, 0, VERSION, self.endpoint)
        records: dict[int, ConversationRecord] = {}
        limit = TimeLimit(120)
        while len(records) < len(samples):
            assert limit.left() > 0, "conversations did not end"
            actions = loop.collect(wait=True)
            for request in actions.requests:
                if request.id not in actions.aborted:
                    loop.complete(_completion(request))
            records |= {r.sample_id: r for r in actions.ended}
        return [records[s.id] for s in samples]

    def close(self) -> None:
        self.env_pool.close()
        self.endpoint.stop()


def _completion(request: Request) -> Completion:
    tokens = np.array(sampled("qwen", f"four {request.id}"), np.int64)
    return Completion(request.sample_id, tokens, np.full(len(tokens), -0.5, np.float32), True, VERSION, request.id)


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.close()


def test_all_need_the_endpoint(worker: Worker) -> None:
    assert all((d.kind, d.needs_endpoint) == ("program", True) for d in worker.descriptions)


@pytest.mark.parametrize("environment", [0, 2], ids=["function", "program"])
def test_calls_of_an_agent_become_its_sample(worker: Worker, environment: int) -> None:
    records = worker.converse([{"number": i, "turns": 1 + i % 3} for i in range(3)], environment)
    for i, record in enumerate(records):
        assert (record.failure, record.turns, record.reward) == (None, 1 + i % 3, i / 10)
        assert (record.messages[0]["role"], record.messages[0]["content"]) == ("user", f"question {i}")
        said = [m["content"] for m in record.messages if m["role"] == "assistant"]
        ours = [t for t, m in zip(record.tokens, record.mask, strict=True) if m]
        assert ours == [token for text in said for token in sampled("qwen", text)]
        assert record.metrics["asked"] == 1 + i % 3


def test_a_coroutine_may_ask_at_once_and_both_branches_are_trained(worker: Worker) -> None:
    [record] = worker.converse([{}], 1)
    assert (record.failure, record.reward, record.turns) == (None, 1.0, 3)
    assert (len(record.branches), record.compactions) == (1, 0)
    ours = [t for t, m in zip(record.tokens, record.mask, strict=True) if m]
    assert len(ours) > len(sampled("qwen", "four 0"))


def test_a_program_that_prints_no_reward_has_none_and_one_that_fails_is_named(worker: Worker) -> None:
    silent, broken, good = worker.converse([{"number": 1, "silent": 1}, {"what": "raise"}, {"number": 5}], 2)
    assert (silent.failure, silent.reward, silent.turns) == (None, 0.0, 2)
    assert broken.failure is not None
    assert broken.failure.startswith("exited with 1; what it wrote to stderr is in the log")
    assert (good.failure, good.reward) == (None, 0.5)


def test_faults_of_agents_cost_their_own_samples(
    worker: Worker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """All at once, beside conversations in which nothing goes wrong."""
    caplog.set_level(logging.WARNING)
    faults = ["never", "late", "victim", "thief", "flood", "ignores_limits", "hang"]
    rows = [{"what": what, "folder": str(tmp_path), "number": i} for i, what in enumerate(faults)]
    rows += [{"what": "good", "folder": str(tmp_path), "number": 7}] * 5
    records = worker.converse(rows, 3)
    found = dict(zip(faults, records, strict=False))
    assert all((r.failure, r.reward, r.turns) == (None, 0.7, 2) for r in records[len(faults) :])
    assert "never called the model" in (found["never"].failure or "")
    assert found["late"].failure is None
    assert found["late"].turns >= 1  # and as many of the other process's calls as came in time
    assert (found["victim"].failure, found["victim"].turns, found["victim"].branches) == (None, 1, [])
    assert "the key is not that of sample 103" in (found["thief"].failure or "")
    assert "a call to the session of sample 103 had the key of sample 102" in caplog.text
    for name in ("flood", "ignores_limits"):
        assert "had 64 calls of the endpoint refused" in (found[name].failure or ""), name
    assert "took longer than 2 s" in (found["hang"].failure or "")


def test_an_agent_that_fails_at_a_limit_is_no_failure(worker: Worker) -> None:
    for limits, turns in ((ConversationLimits(2, 400), 2), (ConversationLimits(9, 16), 1)):
        [record] = worker.converse([{"number": 1, "turns": 9}], 0, limits)
        assert (record.failure, record.turns, record.finished) == (None, turns, False)


def test_an_agent_that_fails_because_its_turn_was_cut_is_no_failure(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But one that fails after a whole turn is."""
    row = {"what": "strict", "folder": ""}
    [whole] = worker.converse([row], 3)
    assert "AssertionError" in (whole.failure or "")
    monkeypatch.setitem(globals(), "_completion", lambda request: replace(_whole(request), finished=False))
    [cut] = worker.converse([row], 3)
    assert (cut.failure, cut.turns, cut.finished) == (None, 1, False)


_whole = _completion


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (EnvironmentSpec("x", command=["no-such-program"]), "there is no program 'no-such-program'"),
        (EnvironmentSpec("x", "scripted_agents.py:asks", kind="program", args={"row": 1}), ""),
        (EnvironmentSpec("x", "bad_agents.py:wants", kind="program"), "a parameter 'database' that nobody gives"),
    ],
)
def test_what_cannot_work_is_said_before_the_first_step(spec: EnvironmentSpec, words: str, tmp_path: Path) -> None:
    (tmp_path / "bad_agents.py").write_text("def wants(base_url, api_key, database): ...\n")
    (tmp_path / "scripted_agents.py").write_text((BASE / "scripted_agents.py").read_text())
    pool = EnvPool([spec], tmp_path)
    try:
        if words:
            with pytest.raises(EnvironmentSetupError, match=words):
                pool.describe()
        else:
            assert pool.describe()[0].kind == "program"
    finally:
        pool.close()


def test_read_result() -> None:
    from distflow.agents.adapters.program import read_result
    from distflow.agents.child import EnvironmentFault

    assert read_result(None).reward is None
    assert read_result(np.float32(0.5)).reward == 0.5
    assert read_result(json.loads('{"reward": null, "metrics": {"a": 1}}')).metrics == {"a": 1.0}
    for value in ("high", {"reward": "high"}, {"metrics": [1]}, float("nan")):
        with pytest.raises(EnvironmentFault):
            read_result(value)
