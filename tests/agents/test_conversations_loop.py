"""The loop of conversations: whatever comes when, every sample has the tokens it would have alone."""

from collections.abc import Callable, Generator, Iterator, Mapping
from functools import cache
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from agents.fake_env_pool import FakeEnvPool, Script
from distflow.agents.choice import choose_environments, group_seed
from distflow.agents.conversation import Sample
from distflow.agents.conversations import Conversations
from distflow.agents.converse import _decode, _encode, converse
from distflow.agents.record import ConversationRecord, columns
from distflow.agents.rendering import Renderer
from distflow.agents.runtime import EnvironmentRuntime
from distflow.agents.session import ConversationLimits
from distflow.cpu import kernels_for
from distflow.errors import DataError, WeightsError
from distflow.model.source import Source
from distflow.model.text import Text
from distflow.model.tokenizer import train_tokenizer
from distflow.rollout.builtin.generator import Generator as Engine
from distflow.rollout.engine import Completion, Request, SamplingParams, Wake, never
from rollout.plain_loop import generator_for, passes
from tiny import config_of, randomize_weights

VERSION, SEED = 3, 5
LIMITS = ConversationLimits(max_turns=4, max_tokens=48, turn_tokens=6)


@cache
def text() -> Text:
    return Text(Source("tiny", config_of("qwen2"), train_tokenizer(iter(["some text"]), 0)), 64)


@cache
def model() -> Any:
    config = config_of("qwen2", vocab_size=len(text().tokenizer), max_position_embeddings=256)
    made = AutoModelForCausalLM.from_config(config, attn_implementation="distflow", dtype=torch.float32).eval()
    randomize_weights(made)
    return made


class FakeEngine:
    """The generator as an engine; keeps the requests it was given."""

    def __init__(self, max_sequences: int = 8, version: int = VERSION) -> None:
        self.generator: Engine = generator_for(model(), max_sequences)
        self.generator.weight_version = version
        self.requests, self.woken = list[Request](), 0

    def add_request(self, request: Request) -> None:
        self.requests.append(request)
        self.generator.add_request(request)

    @property
    def has_unfinished(self) -> bool:
        return self.generator.has_unfinished

    def step(self, wake: Wake = never) -> list[Completion]:
        completions = self.generator.step(wake)
        self.woken += not completions
        return completions

    def __getattr__(self, name: str) -> Any:
        return getattr(self.generator, name)


def talk(start: Mapping[str, Any]) -> Generator[dict[str, Any], dict[str, Any], None]:
    """Echoes what the model says a few times, with a reward for each turn; odd samples talk longer."""
    messages = [{"role": "user", "content": start["prompt"]}]
    assert (yield {"op": "begin", "messages": messages, "tools": []}) == {"branch": 0}
    new: list[dict[str, Any]] = []
    for turn in range(3 + start["sample_id"] % 2 * 4):
        answer = yield {"op": "turn", "branch": 0, "messages": new}
        if "ended" in answer:
            break
        yield {"op": "turn_reward", "branch": 0, "reward": turn / 4}
        new = [{"role": "user", "content": f"{answer['message']['content'][:2]}? {start['row']['more']}"}]
    metrics = {"said": len(messages), "tool_errors": 1}
    yield {"op": "done", "reward": None, "rewards": {}, "metrics": metrics, "extra": {}, "error": None}


def have(
    script: Script = talk,
    samples: range = range(7),
    delay: Callable[[int, int], int] = lambda key, number: 0,
    concurrent: int = 64,
    engine: FakeEngine | None = None,
    limits: ConversationLimits = LIMITS,
    **options: Any,
) -> tuple[dict[int, ConversationRecord], FakeEngine, FakeEnvPool]:
    engine, pool = engine or FakeEngine(), FakeEnvPool(script, delay)
    runtime = EnvironmentRuntime("echo", Renderer(text()), limits, concurrent)
    rows = [Sample(i, 0, f"prompt {i // 2}", {"more": "so" * (i % 3)}, group_seed(SEED, i)) for i in samples]
    stop = frozenset({text().tokenizer.eos_token_id, 70, 71, 72, 73, 74, 75})
    params = SamplingParams(limits.max_tokens, stop=stop)
    conversations = Conversations(rows, [runtime], pool, params, SEED, VERSION, **options)
    records, _ = converse(cast(Any, engine), conversations, list(samples), 200, concurrent)
    assert not engine.generator.has_unfinished
    assert not pool.running
    return records, engine, pool


def content(record: ConversationRecord) -> tuple[Any, ...]:
    return record.prompt, record.tokens, record.mask, record.turn_rewards, record.messages, record.reward, record.turns


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
def test_a_sample_has_the_same_conversation_whatever_the_others_do() -> None:
    """To the bit with kernels, as workers on a CPU have them: a row's logits do not depend on the other rows."""
    together, engine, _ = have()
    assert engine.woken  # requests came while others were decoding
    assert {r.turns for r in together.values()} > {3}
    late, *_ = have(delay=lambda key, number: (key * 7 + number * 3) % 11)
    few, _, pool = have(concurrent=2, engine=FakeEngine(max_sequences=1))
    assert pool.most == 2
    alone = {i: have(samples=range(i, i + 1))[0][i] for i in range(7)}
    for other in (late, few, alone):
        for i, record in together.items():
            assert content(other[i]) == content(record)
            near = record.logprobs if kernels_for(torch.zeros(1)) else pytest.approx(record.logprobs, abs=1e-4)
            assert other[i].logprobs == near


def test_tokens_are_those_that_the_engine_saw_and_sampled() -> None:
    records, engine, _ = have()
    for i, record in records.items():
        whole = [*record.prompt, *record.tokens]
        requests = [r for r in engine.requests if r.sample_id == i]
        assert len(requests) == record.turns
        sampled = [k for k, mine in enumerate(record.mask) if mine]
        covered: list[int] = []
        for request in requests:
            assert list(request.prompt) == whole[: len(request.prompt)]
            first = len(request.prompt) - len(record.prompt)
            assert request.position == first  # so noise is that of the index in the response
            turn = [k for k in sampled if k >= first][: request.room]
            covered += [k for k in turn if turn[0] + turn.index(k) == k]
        assert covered == sampled
        assert len(set(covered)) == len(covered)
        assert record.mask[-1] == 1  # nothing is said after the last turn
        assert [p == 0 for p in record.logprobs] == [not m for m in record.mask]
        ends = [k for k in sampled if k + 1 not in sampled]
        assert [k for k, r in enumerate(record.turn_rewards) if r] == ends[1:]
        assert record.reward == sum(record.turn_rewards)
        assert record.tool_errors == 1
        assert record.metrics == {"said": 1.0}


@pytest.mark.parametrize(("concurrent", "late"), [(64, 0), (2, 3)])
def test_a_turn_computes_what_is_new_since_the_last_one(concurrent: int, late: int) -> None:
    """Whenever it comes: the last token that was sampled, and what the environment has said."""
    with passes() as computed:
        records, *_ = have(delay=lambda key, number: (key + number) * late % 7, concurrent=concurrent)
    turns = sum(r.turns for r in records.values())
    said = sum(r.mask.count(0) for r in records.values())
    assert turns > 3 * len(records)
    assert sum(computed["Extension"]) == said + turns - len(records)
    assert sum(computed["Prefill"]) <= sum(len(r.prompt) for r in records.values())


def test_limits_end_a_conversation() -> None:
    turns, *_ = have(limits=ConversationLimits(2, 48, 6))
    assert all(r.turns == 2 and not r.finished for r in turns.values())
    tokens, *_ = have(limits=ConversationLimits(9, 20, 6))
    assert all(len(r.tokens) <= 20 for r in tokens.values())
    assert any(r.turns > 1 for r in tokens.values())


def test_a_failure_costs_its_own_sample_only() -> None:
    def failing(start: Mapping[str, Any]) -> Generator[dict[str, Any], dict[str, Any], None]:
        conversation, answer, count = talk(start), None, 0
        while True:
            if start["sample_id"] == 3 and count == 4:
                raise RuntimeError("took longer than 1 s")
            if start["sample_id"] == 4:
                raise RuntimeError("ended its process")
            try:
                answer = yield conversation.send(answer)  # type: ignore[arg-type]
            except StopIteration:
                return
            count += 1

    good, *_ = have()
    records, *_ = have(failing)
    assert {i: r.failure for i, r in records.items() if r.failure} == {
        3: "took longer than 1 s",
        4: "ended its process",
    }
    for i in (0, 1, 2, 5, 6):
        assert content(records[i]) == content(good[i])
    assert records[3].tokens == good[3].tokens[: len(records[3].tokens)]
    assert len(records[3].tokens)
    assert records[4].prompt == text().encode("prompt 2")  # it never began
    assert not records[4].tokens


def test_an_environment_is_told_what_it_did_wrong() -> None:
    heard = []

    def wrong(start: Mapping[str, Any]) -> Generator[dict[str, Any], dict[str, Any], None]:
        heard.append((yield {"op": "begin", "messages": [{"role": "user", "content": "x" * 10_000}]}))
        heard.append((yield {"op": "turn", "branch": 7, "messages": []}))
        yield {"op": "done", "reward": 1.0, "rewards": {}, "metrics": {}, "extra": {}, "error": None}

    records, *_ = have(wrong, range(1))
    assert "longest" in heard[0]["error"]
    assert "error" in heard[1]
    assert records[0].turns == 0


def test_token_level_and_text_operations() -> None:
    heard: list[dict[str, Any]] = []

    def loop(start: Mapping[str, Any]) -> Generator[dict[str, Any], dict[str, Any], None]:
        messages = [{"role": "user", "content": "two"}]
        heard.append((yield {"op": "apply_chat_template", "messages": messages}))
        heard.append((yield {"op": "generate", "token_ids": heard[0]["token_ids"], "sampling": {"max_tokens": 3}}))
        heard.append((yield {"op": "decode", "token_ids": heard[1]["token_ids"]}))
        heard.append((yield {"op": "encode", "text": " more"}))
        ids = [*heard[0]["token_ids"], *heard[1]["token_ids"], *heard[3]["token_ids"]]
        heard.append((yield {"op": "generate", "token_ids": ids, "sampling": {}}))
        yield {"op": "done", "reward": 0.25, "rewards": {}, "metrics": {}, "extra": {}, "error": None}

    records, *_ = have(loop, range(1))
    record = records[0]
    prompt, first, _, more, second = heard
    assert len(first["token_ids"]) <= 3
    assert record.prompt == prompt["token_ids"]
    assert record.tokens == [*first["token_ids"], *more["token_ids"], *second["token_ids"]]
    lengths = len(first["token_ids"]), len(more["token_ids"]), len(second["token_ids"])
    assert record.mask == [1] * lengths[0] + [0] * lengths[1] + [1] * lengths[2]
    assert record.reward == 0.25


def test_a_missed_weight_sync_is_an_error() -> None:
    with pytest.raises(WeightsError, match="sample 0 was generated with weights of version 2"):
        have(samples=range(1), engine=FakeEngine(version=2))


def test_columns_keep_everything() -> None:
    records = list(have()[0].values())
    fields = columns(records, text())
    assert [c.tolist() for c in fields["response_tokens"]] == [r.tokens for r in records]
    assert [c.tolist() for c in fields["response_mask"]] == [r.mask for r in records]
    assert fields["env_reward"].tolist() == pytest.approx([r.reward for r in records])
    assert fields["conversation"] == [r.messages for r in records]
    none = columns([], text())
    assert none.keys() == fields.keys()
    assert all(len(c) == 0 for c in none.values())


def test_what_a_replica_is_told_arrives() -> None:
    from distflow.agents.conversations import Actions

    records = list(have()[0].values())
    request = Request(3, (1, 2), SamplingParams(9, stop=frozenset({4, 2})), SEED, 5, 4, 17)
    actions = Actions([request, request], [8], records)
    assert _decode(_encode(actions)) == actions


def test_rows_or_ratios_choose_the_environment() -> None:
    groups = np.arange(4000)
    chosen = choose_environments(["a", "b", "c"], [1.0, 3.0, 0.0], groups, seed=1)
    assert chosen.count(2) == 0
    assert 0.71 < chosen.count(1) / 4000 < 0.79
    assert chosen == choose_environments(["a", "b", "c"], [1.0, 3.0, 0.0], groups, seed=1)
    assert chosen != choose_environments(["a", "b", "c"], [1.0, 3.0, 0.0], groups, seed=2)
    half = choose_environments(["a", "b", "c"], [1.0, 3.0, 0.0], groups[7::2], seed=1)
    assert half == chosen[7::2]  # of each prompt alone
    assert choose_environments(["a", "b"], [1.0, 1.0], groups[:2], 0, named=["b", "a"]) == [1, 0]
    with pytest.raises(DataError, match="'c', and there is none of that name"):
        choose_environments(["a", "b"], [1.0, 1.0], groups[:1], 0, named=["c"])
