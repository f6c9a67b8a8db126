"""Responses that are carried on from step to step are, with the same weights, those that are generated at once."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from distflow.batch.batch import Batch
from distflow.errors import WeightsError
from distflow.rollout.engine import Request, SamplingParams
from distflow.rollout.responses import generate_responses
from distflow.run.rollouts import PartialRollouts
from rollout.plain_loop import PARAMS, PROMPTS, SEED, generator

REPEAT, BATCH, STEPS = 3, 2, 5  # samples of a prompt, prompts of a step


class Words:
    """A text of which every token is a word, its number."""

    images = None

    def encode(self, prompt: str, images: object = ()) -> list[int]:
        return [int(word) for word in prompt.split()]

    def decode(self, tokens: Any) -> list[str]:
        return [" ".join(map(str, t.tolist())) for t in tokens]


def recording(max_sequences: int) -> Any:
    """Returns a generator that remembers the requests it was given."""
    made: Any = generator("qwen2", max_sequences)
    made.added, made.begun_with, add = list[Request](), dict[int, int](), made.add_request

    def add_request(request: Request) -> None:
        made.added.append(request)
        if not request.position:
            made.begun_with[request.sample_id] = made.weight_version
        add(request)

    made.add_request = add_request
    return made


def samples(first: int, prompts: int) -> Batch:
    ids = np.arange(first * REPEAT, (first + prompts) * REPEAT, dtype=np.int64)
    texts = [" ".join(map(str, PROMPTS[int(i) // REPEAT % len(PROMPTS)])) for i in ids]
    return Batch(ids, ids // REPEAT, {"prompt": texts})


def run(engine: Any, ahead: int, params: SamplingParams = PARAMS) -> tuple[dict[int, Any], list[int]]:
    """Returns sample → (tokens, log-probs, finished, version) of all steps, and the tokens carried on after each."""
    responses, carried, begun = dict[int, Any](), list[int](), None
    for step in range(STEPS):
        engine.weight_version = step
        batch = samples(step * BATCH, BATCH)
        partial = PartialRollouts(samples((step + 1) * BATCH, ahead if step + 1 < STEPS else 0), begun)
        text: Any = Words()
        columns = generate_responses(engine, text, batch, params, SEED, step, partial=partial)
        assert not engine.has_unfinished
        begun = partial.carried
        assert begun is not None
        carried.append(int(begun["tokens"].lengths.sum()))
        rows = zip(
            *(columns[f] for f in ("response_tokens", "rollout_logprobs", "finished", "weight_version")), strict=True
        )
        responses |= dict(zip(batch.ids.tolist(), rows, strict=True))
    return responses, carried


@pytest.mark.parametrize("params", [PARAMS, replace(PARAMS, temperature=0.0)], ids=["sampled", "greedy"])
@pytest.mark.parametrize(("max_sequences", "ahead"), [(2, 2), (4, 3), (64, 2)])
def test_with_the_same_weights_they_are_the_same(max_sequences: int, ahead: int, params: SamplingParams) -> None:
    text: Any = Words()
    engine = recording(64)
    whole = generate_responses(engine, text, samples(0, BATCH * STEPS), params, SEED, 0)
    responses, carried = run(recording(max_sequences), ahead, params)
    assert any(carried[:-1])
    assert carried[-1] == 0
    assert list(responses) == list(range(BATCH * STEPS * REPEAT))
    for i, (tokens, logprobs, finished, version) in responses.items():
        assert tokens.tolist() == whole["response_tokens"][i].tolist()
        assert torch.allclose(logprobs, whole["rollout_logprobs"][i], atol=1e-4)
        assert bool(finished) == bool(whole["finished"][i])
        assert int(version) <= i // (BATCH * REPEAT)
    assert any(int(version) < i // (BATCH * REPEAT) for i, (*_, version) in responses.items())


def test_the_version_of_a_response_is_that_of_the_weights_which_began_it() -> None:
    engine = recording(3)
    responses, _ = run(engine, 2)
    versions = {i: int(version) for i, (*_, version) in responses.items()}
    assert versions == engine.begun_with
    rests = {r.sample_id for r in engine.added if r.position}
    assert any(versions[i] < i // (BATCH * REPEAT) for i in rests)  # some went on with later weights


def test_what_is_carried_on_is_the_same_from_run_to_run_to_the_bit() -> None:
    first, again = (run(recording(3), 2) for _ in range(2))
    assert first[1] == again[1]
    for i, (tokens, logprobs, *rest) in first[0].items():
        assert tokens.equal(again[0][i][0])
        assert logprobs.equal(again[0][i][1])
        assert rest == list(again[0][i][2:])


def test_prompts_of_later_steps_start_after_those_of_the_step_and_nothing_is_generated_twice() -> None:
    engine = recording(3)
    responses, _ = run(engine, 2)
    rests: dict[int, list[int]] = {}
    for request in engine.added:
        rests.setdefault(request.sample_id, []).append(request.position)
    for i, positions in rests.items():
        assert positions == sorted(positions)
        assert positions[-1] < len(responses[i][0])
    own = [r for r in engine.added if r.sample_id < BATCH * REPEAT]
    assert {r.priority for r in own} == {0}
    assert {r.priority for r in engine.added} == {0, 1}


def test_a_response_of_another_version_than_the_plans_is_still_refused() -> None:
    engine = recording(3)
    engine.weight_version = 7
    text: Any = Words()
    with pytest.raises(WeightsError, match="version 7, and the plan says 8"):
        generate_responses(engine, text, samples(0, 2), PARAMS, SEED, 8, partial=PartialRollouts(samples(2, 2), None))


def test_nothing_is_generated_if_all_was_begun_before_and_is_complete() -> None:
    engine = recording(64)
    text: Any = Words()
    partial = PartialRollouts(samples(2, 2), None)
    generate_responses(engine, text, samples(0, 2), replace(PARAMS, max_tokens=2), SEED, 0, partial=partial)
    assert partial.carried is not None
    complete = partial.carried.select(np.flatnonzero(partial.carried["complete"].numpy()))
    count = len(engine.added)
    prompts = len(complete) // REPEAT
    assert prompts
    again = PartialRollouts(samples(4, 0), complete)
    columns = generate_responses(
        engine, text, samples(2, prompts), replace(PARAMS, max_tokens=2), SEED, 1, partial=again
    )
    assert len(engine.added) == count
    assert columns["weight_version"].tolist() == [0] * len(complete)
