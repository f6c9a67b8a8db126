"""Samples to micro-batches, and a micro-batch to one row of tokens. Padding does not exist here."""

from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from distflow.data.balance import Ints
from distflow.data.batch import Batch, Ragged, select

PROMPT, RESPONSE, ROLLOUT = "prompt_tokens", "response_tokens", "rollout_logprobs"


def micro_batches(lengths: Ints, budget: int) -> list[Ints]:
    """Indices of samples, at most `budget` tokens together; a sample longer than that is alone. Longest first."""
    bins: list[list[int]] = []
    room: list[int] = []
    for i in np.argsort(-lengths, kind="stable").tolist():
        fits = next((k for k, r in enumerate(room) if r >= lengths[i]), None)
        if fits is None:
            bins.append([i])
            room.append(budget - int(lengths[i]))
        else:
            bins[fits].append(i)
            room[fits] -= int(lengths[i])
    return [np.array(b, np.int64) for b in bins]


@dataclass(frozen=True)
class Pack:
    """Sequences one after the other, each a prompt and its response without the last token, which predicts nothing."""

    index: Ints  # [samples]: which samples of the batch, in the order they are in here
    tokens: Tensor  # [tokens]
    positions: Tensor  # [tokens]
    lengths: list[int]  # of the sequences
    keep: Tensor  # [responses]: where response tokens are predicted
    targets: Tensor  # [responses]: these tokens
    responses: Tensor  # [samples]: tokens of each response
    per_token: Mapping[str, Tensor]  # [responses]
    per_sample: Mapping[str, Tensor]  # [samples]

    def to(self, device: torch.device) -> "Pack":
        if device.type == "cpu":
            return self
        moved = {f.name: getattr(self, f.name) for f in fields(self)}
        for name, value in moved.items():
            if isinstance(value, Tensor):
                moved[name] = value.to(device)
            elif isinstance(value, Mapping):
                moved[name] = {k: v.to(device) for k, v in value.items()}
        return Pack(**moved)


def sequence_lengths(batch: Batch) -> Ints:
    """Tokens that a forward pass computes for each sample."""
    total: Ints = batch[PROMPT].lengths + batch[RESPONSE].lengths - 1
    return total


def pack(batch: Batch, index: Ints) -> Pack:
    """Some samples, those of one length side by side: attention then takes them together."""
    index = index[np.argsort(-sequence_lengths(batch)[index], kind="stable")]
    prompts, responses = batch[PROMPT].select(index), batch[RESPONSE].select(index)
    rows, keep, start = [], [], 0
    lengths = []
    for prompt, response in zip(prompts, responses, strict=True):
        row = torch.cat((prompt, response[:-1])) if len(response) else prompt[:-1]
        keep.append(torch.arange(start + len(prompt) - 1, start + len(prompt) - 1 + len(response)))
        rows.append(row)
        lengths.append(len(row))
        start += len(row)
    columns = {f: select(c, index) for f, c in batch.columns.items() if f not in (PROMPT, RESPONSE)}
    return Pack(
        index=index,
        tokens=torch.cat(rows),
        positions=torch.cat([torch.arange(n) for n in lengths]),
        lengths=lengths,
        keep=torch.cat(keep),
        targets=responses.joined(),
        responses=torch.from_numpy(responses.lengths),
        per_token={f: c.joined() for f, c in columns.items() if isinstance(c, Ragged)},
        per_sample={f: c for f, c in columns.items() if isinstance(c, Tensor)},
    )


def nothing() -> Pack:
    """One token that counts for nothing: who has no more samples takes part in the collectives all the same."""
    one, none = torch.zeros(1, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
    return Pack(none.numpy(), one, one, [1], none, none, none, {}, {})
