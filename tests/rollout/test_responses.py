"""Responses to a batch: one request per sample, of which those of a group share a prompt, and columns in its order."""

from collections.abc import Iterable, Mapping
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from distflow.batch.batch import Batch, Ragged
from distflow.errors import DataError, WeightsError
from distflow.model.source import Source
from distflow.model.text import Text
from distflow.model.tokenizer import train_tokenizer
from distflow.observe.metrics import StepMetrics
from distflow.rollout.engine import Completion, Request, RolloutEngine, SamplingParams, Wake, never
from distflow.rollout.responses import complete, generate_responses, log_lengths

PARAMS = SamplingParams(max_tokens=4)
PROMPTS = {3: "one", 5: "two", 9: "three"}  # by group
IDS, GROUPS = [19, 6, 10, 7, 18, 11], [9, 3, 5, 3, 9, 5]


@cache
def text() -> Text:
    return Text(Source("tiny", AutoConfig.for_model("qwen2"), train_tokenizer(iter(["one two three"]), 0)), 100)


VERSION = 2  # of the weights


class EchoEngine(RolloutEngine):
    """Another engine than the built-in one: responds with the prompt reversed, last request first."""

    def __init__(self) -> None:
        self.weight_version = VERSION
        self.requests: list[Request] = []
        self.unfinished: list[Request] = []

    def held_weights(self) -> Mapping[str, Tensor]:
        return {}

    def weight_targets(self) -> Mapping[str, Tensor]:
        return {}

    def add_request(self, request: Request) -> None:
        self.requests.append(request)
        self.unfinished.append(request)

    @property
    def has_unfinished(self) -> bool:
        return bool(self.unfinished)

    def abort(self, request_ids: Iterable[int]) -> None: ...

    def step(self, wake: Wake = never) -> list[Completion]:
        done, self.unfinished = self.unfinished[-2:], self.unfinished[:-2]
        return [self.completion(request) for request in done]

    def completion(self, request: Request) -> Completion:
        tokens = np.array(request.prompt[::-1], np.int64)
        logprobs = np.full(len(tokens), -request.sample_id, np.float32)
        return Completion(request.sample_id, tokens, logprobs, request.sample_id % 2 == 0, self.weight_version)


def batch(ids: list[int] = IDS, groups: list[int] = GROUPS) -> Batch:
    return Batch(np.array(ids, np.int64), np.array(groups, np.int64), {"prompt": [PROMPTS[g] for g in groups]})


def test_each_sample_gets_the_response_to_its_request() -> None:
    engine = EchoEngine()
    columns = generate_responses(engine, text(), batch(), PARAMS, seed=7, version=VERSION)
    prompts = [text().encode(PROMPTS[g]) for g in GROUPS]
    assert [t.tolist() for t in columns["prompt_tokens"]] == prompts
    assert [t.tolist() for t in columns["response_tokens"]] == [p[::-1] for p in prompts]
    assert [t.tolist() for t in columns["rollout_logprobs"]] == [
        [-i] * len(p) for i, p in zip(IDS, prompts, strict=True)
    ]
    assert columns["response"] == [PROMPTS[g][::-1] for g in GROUPS]
    assert columns["finished"].tolist() == [i % 2 == 0 for i in IDS]
    assert columns["response_tokens"].dtype == torch.int64
    assert columns["rollout_logprobs"].dtype == torch.float32


def test_there_is_one_request_per_sample_and_those_of_a_group_follow_each_other() -> None:
    engine = EchoEngine()
    generate_responses(engine, text(), batch(), PARAMS, seed=7, version=VERSION)
    assert [r.sample_id for r in engine.requests] == [6, 7, 10, 11, 19, 18]
    assert {(r.params, r.seed, r.position) for r in engine.requests} == {(PARAMS, 7, 0)}
    for a, b in zip(engine.requests[::2], engine.requests[1::2], strict=True):
        assert a.prompt == b.prompt


def test_a_greedy_response_is_generated_once_per_prompt() -> None:
    engine = EchoEngine()
    columns = generate_responses(engine, text(), batch(), SamplingParams(4, temperature=0.0), seed=7, version=VERSION)
    assert [r.sample_id for r in engine.requests] == [6, 10, 19]
    assert columns["response"] == [PROMPTS[g][::-1] for g in GROUPS]
    assert columns["rollout_logprobs"][0].tolist() == columns["rollout_logprobs"][4].tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_without_samples_there_are_no_requests_and_the_columns_have_the_same_types(temperature: float) -> None:
    engine, params = EchoEngine(), SamplingParams(4, temperature=temperature)
    some = generate_responses(engine, text(), batch(), params, seed=7, version=VERSION)
    engine.requests.clear()
    none = generate_responses(engine, text(), batch([], []), params, seed=7, version=VERSION)
    assert engine.requests == []
    assert {f: len(c) for f, c in none.items()} == dict.fromkeys(some, 0)
    assert [(type(c), getattr(c, "dtype", None)) for c in none.values()] == [
        (type(c), getattr(c, "dtype", None)) for c in some.values()
    ]


def test_a_prompt_that_cannot_be_encoded_is_refused_before_anything_is_generated() -> None:
    engine = EchoEngine()
    bad = Batch(np.arange(2), np.arange(2), {"prompt": ["fine", ""]})
    with pytest.raises(DataError, match="the prompt is empty"):
        generate_responses(engine, text(), bad, PARAMS, seed=7, version=VERSION)
    assert engine.requests == []


def test_completions_are_by_sample_id() -> None:
    engine: RolloutEngine = EchoEngine()
    requests = [Request(i, (i, i + 1), PARAMS, 0) for i in range(5)]
    completions = complete(engine, requests)
    assert {i: c.tokens.tolist() for i, c in completions.items()} == {i: [i + 1, i] for i in range(5)}
    assert {c.weight_version for c in completions.values()} == {2}


def test_responses_with_other_weights_than_the_plan_says_are_refused() -> None:
    with pytest.raises(WeightsError, match=r"sample \d+ was generated with weights of version 2, and the plan says 3"):
        generate_responses(EchoEngine(), text(), batch(), PARAMS, seed=7, version=3)


@pytest.mark.parametrize("masked", [False, True])
def test_lengths_are_of_sampled_tokens_and_the_clip_ratio_is_of_responses_that_were_cut_off(masked: bool) -> None:
    lengths = [5, 2, 8, 3]
    responses = {
        "response_tokens": Ragged.of([torch.zeros(n, dtype=torch.int64) for n in lengths]),
        "finished": torch.tensor([True, True, False, True]),
    }
    if masked:  # the first token of each is not the model's
        responses["response_mask"] = Ragged.of([torch.tensor([0] + [1] * (n - 1)) for n in lengths])
    metrics, shorter = StepMetrics(), int(masked)
    assert log_lengths(responses, metrics, "greedy_") == 18 - 4 * shorter
    values = {n: v / c if how == "mean" else v for (n, how), (v, c) in metrics.totals.items()}
    assert values == {
        "greedy_response_length/mean": 4.5 - shorter,
        "greedy_response_length/max": 8.0 - shorter,
        "greedy_response_length/clip_ratio": 0.25,
    }
