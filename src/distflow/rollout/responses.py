"""Responses to the prompts of a batch: requests to a rollout engine, its completions as columns of the batch."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from distflow.batch.batch import NO_SAMPLES, Batch, Ragged
from distflow.batch.context import Chunks, MetricLog, Partial
from distflow.batch.response_mask import ModelTokens
from distflow.errors import WeightsError
from distflow.model.experts import PROMPT_EXPERTS, RESPONSE_EXPERTS
from distflow.model.text import Text, images_of, ragged
from distflow.rollout.engine import Completion, Request, RolloutEngine, SamplingParams
from distflow.rollout.partial import Begun, complete_with_others
from distflow.util.arrays import Ints


def generate_responses(
    engine: RolloutEngine,
    text: Text,
    batch: Batch,
    params: SamplingParams,
    seed: int,
    version: int,
    on_step: Callable[[int], None] = lambda left: None,
    chunks: Chunks | None = None,
    partial: Partial | None = None,
    experts: bool = False,
) -> dict[str, Any]:
    """Generates a response for each sample of the field `prompt`; samples of one group share a prompt.

    `version` is that of the weights which the plan wants. `on_step` is told how many are left; `chunks` leave as soon
    as they are complete. With `partial`, responses of later steps are begun, and earlier begun ones are carried on.
    With `experts`, the experts that a mixture has chosen are columns too.
    """
    prompts, requests, own, prompt_of = _requests(text, batch, params, seed)

    def columns(places: Ints, completions: Mapping[int, Completion]) -> dict[str, Any]:
        ordered = [completions[i] for i in own[places].tolist()]
        return _columns(ordered, [prompts[i] for i in prompt_of[places]], text, experts)

    waiting = {i: set(own[places].tolist()) for i, places in enumerate(chunks.parts)} if chunks else {}

    def progress(completions: Mapping[int, Completion]) -> None:
        on_step(len(requests) - len(completions))
        for i in [i for i, samples in waiting.items() if samples <= completions.keys()]:
            assert chunks is not None
            del waiting[i]
            chunks.leave(i, columns(chunks.parts[i], completions))

    if partial is None:
        completions = complete(engine, requests, version, progress)
    else:
        assert engine.interruptible
        as_read = [text.images.as_read] if text.images else []
        begun, others = Begun(partial, *as_read), _requests(text, partial.ahead, params, seed)[1]
        completions = complete_with_others(engine, requests, others, begun, version, progress)
    return columns(np.arange(len(batch)), completions)


def _requests(
    text: Text, batch: Batch, params: SamplingParams, seed: int
) -> tuple[list[tuple[int, ...]], list[Request], Ints, Ints]:
    """Returns the prompts of a batch, its requests, and for each sample, whose response it has, and its prompt."""
    _, first, prompt_of = np.unique(batch.groups, return_index=True, return_inverse=True)
    distinct = batch.select(first)
    images = [tuple(i) for i in images_of(distinct) or [()] * len(distinct)]
    prompts = [tuple(text.encode(p, i)) for p, i in zip(distinct["prompt"], images, strict=True)]
    greedy = params.temperature == 0  # then all responses to a prompt are the same one
    samples = first if greedy else np.argsort(prompt_of, kind="stable")
    requests = [
        Request(int(batch.ids[i]), prompts[prompt_of[i]], params, seed, images=images[prompt_of[i]])
        for i in samples.tolist()
    ]
    own = (batch.ids[first] if greedy else batch.ids)[prompt_of if greedy else slice(None)]
    return prompts, requests, own, prompt_of


def _columns(
    ordered: Sequence[Completion], prompts: list[tuple[int, ...]], text: Text, experts: bool
) -> dict[str, Any]:
    lengths = np.array([len(c.tokens) for c in ordered], np.int64)
    tokens = Ragged.packed(_joined([c.tokens for c in ordered], np.int64), lengths)
    logprobs = Ragged.packed(_joined([c.logprobs for c in ordered], np.float32), lengths)
    return {
        "prompt_tokens": ragged(prompts),
        "response_tokens": tokens,
        "rollout_logprobs": logprobs,
        "response": text.decode(tokens),
        "finished": torch.tensor([c.finished for c in ordered], dtype=torch.bool),
        "weight_version": torch.tensor([c.weight_version for c in ordered], dtype=torch.int64),
        "token_versions": Ragged.packed(_joined([c.token_versions for c in ordered], np.int64).int(), lengths),
        **(experts_columns(ordered) if experts else {}),
    }


def experts_columns(ordered: Sequence[Completion]) -> dict[str, Any]:
    """Returns the experts of the tokens of prompts and of responses, whose last token has none: −1."""
    each = [c.experts for c in ordered if c.experts is not None]
    if len(each) < len(ordered) or not each:
        if ordered:
            raise WeightsError("the rollout engine gave responses without the experts that rollout.router_replay needs")
        return {PROMPT_EXPERTS: NO_SAMPLES, RESPONSE_EXPERTS: NO_SAMPLES}
    prompts, responses = [], []
    for completion, experts in zip(ordered, each, strict=True):
        of_prompt = len(experts) - len(completion.tokens) + 1
        prompts.append(torch.from_numpy(experts[:of_prompt]))
        rest = torch.from_numpy(experts[of_prompt:])
        responses.append(torch.cat((rest, rest.new_full((1, *rest.shape[1:]), -1))))
    return {PROMPT_EXPERTS: Ragged.of(prompts), RESPONSE_EXPERTS: Ragged.of(responses)}


def _joined(arrays: list[NDArray[Any]], dtype: type) -> Tensor:
    return torch.from_numpy(np.concatenate([np.empty(0, dtype), *arrays]))  # a worker may have no responses


def complete(
    engine: RolloutEngine,
    requests: list[Request],
    version: int | None = None,
    progress: Callable[[Mapping[int, Completion]], None] = lambda completions: None,
) -> dict[int, Completion]:
    """Returns the completion of each request, by sample id; `progress` sees the complete ones.

    Raises if one was generated with other weights than those of `version`.
    """
    for request in requests:
        engine.add_request(request)
    completions: dict[int, Completion] = {}
    while engine.has_unfinished:
        for completion in engine.step():
            if version is not None:
                completion.check_version(version)
            completions[completion.sample_id] = completion
        progress(completions)
    return completions


def log_lengths(responses: Mapping[str, Any], metrics: MetricLog, prefix: str) -> int:
    """Logs how many tokens the model has sampled for each response, and returns how many that are in all."""
    lengths, finished = _sampled_lengths(responses), responses["finished"]
    if not len(lengths):
        return 0
    metrics.log(f"{prefix}response_length/mean", float(lengths.mean()), len(lengths))
    metrics.log(f"{prefix}response_length/max", float(lengths.max()), reduce="max")
    metrics.log(f"{prefix}response_length/clip_ratio", 1 - float(finished.float().mean()), len(lengths))
    return int(lengths.sum())


def log_versions(versions: Ragged, newest: int, metrics: MetricLog) -> None:
    """Logs how old the weights of sampled tokens are, and of how many versions the tokens of a response are."""
    values = versions.joined().numpy()
    response = np.repeat(np.arange(len(versions.lengths)), versions.lengths)[values >= 0]
    values = values[values >= 0]
    if len(values):
        metrics.log("rollout/staleness", float(newest - values.mean()), len(values))
        pairs, count = np.unique(np.stack((response, values)), axis=1), len(np.unique(response))
        metrics.log("rollout/versions", pairs.shape[1] / count, count)


def _sampled_lengths(responses: Mapping[str, Any]) -> Ints:
    tokens: Ragged = responses["response_tokens"]
    mask = responses.get("response_mask")
    return ModelTokens(tokens.lengths, None if mask is None else mask.joined().bool()).lengths
