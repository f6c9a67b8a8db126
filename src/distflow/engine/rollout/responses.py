"""Responses to the prompts of a batch: requests to a rollout engine, its completions as columns of the batch."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from distflow.data.batch import Batch, Ragged
from distflow.data.context import MetricLog
from distflow.engine.model.text import Text, ragged
from distflow.engine.rollout.engine import Completion, Request, RolloutEngine, SamplingParams


def generate_responses(
    engine: RolloutEngine, text: Text, batch: Batch, params: SamplingParams, seed: int
) -> dict[str, Any]:
    """Generates a response for each sample of the field `prompt`; samples of one group share a prompt."""
    _, first, prompt_of = np.unique(batch.groups, return_index=True, return_inverse=True)
    prompts = [tuple(text.encode(batch["prompt"][i])) for i in first.tolist()]
    greedy = params.temperature == 0  # then all responses to a prompt are the same one
    samples = first if greedy else np.argsort(prompt_of, kind="stable")
    requests = [Request(int(batch.ids[i]), prompts[prompt_of[i]], params, seed) for i in samples.tolist()]
    completions = complete(engine, requests)
    own = (batch.ids[first] if greedy else batch.ids)[prompt_of if greedy else slice(None)]
    ordered = [completions[i] for i in own.tolist()]
    lengths = np.array([len(c.tokens) for c in ordered], np.int64)
    tokens = Ragged.packed(_joined([c.tokens for c in ordered], np.int64), lengths)
    logprobs = Ragged.packed(_joined([c.logprobs for c in ordered], np.float32), lengths)
    return {
        "prompt_tokens": ragged([prompts[i] for i in prompt_of]),
        "response_tokens": tokens,
        "rollout_logprobs": logprobs,
        "response": text.decode(tokens),
        "finished": torch.tensor([c.finished for c in ordered], dtype=torch.bool),
    }


def _joined(arrays: list[NDArray[Any]], dtype: type) -> Tensor:
    return torch.from_numpy(np.concatenate([np.empty(0, dtype), *arrays]))  # a worker may have no responses


def complete(engine: RolloutEngine, requests: list[Request]) -> dict[int, Completion]:
    """Returns the completion of each request, by sample id."""
    for request in requests:
        engine.add_request(request)
    completions: dict[int, Completion] = {}
    while engine.has_unfinished:
        completions |= {c.sample_id: c for c in engine.step()}
    return completions


def log_lengths(responses: dict[str, Any], metrics: MetricLog, prefix: str) -> None:
    lengths, finished = responses["response_tokens"].lengths, responses["finished"]
    if not len(lengths):
        return
    metrics.log(f"{prefix}response_length/mean", float(lengths.mean()), len(lengths))
    metrics.log(f"{prefix}response_length/max", float(lengths.max()), reduce="max")
    metrics.log(f"{prefix}response_length/clip_ratio", 1 - float(finished.float().mean()), len(lengths))
