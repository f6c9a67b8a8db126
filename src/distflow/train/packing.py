"""Packs samples into micro-batches, and a micro-batch into one row of tokens, without padding.

All responses of a prompt share its tokens. Tokens that the model did not sample are only context.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from distflow.batch.batch import Batch, Ragged
from distflow.batch.response_mask import MASK, ModelTokens
from distflow.model.attention import SharedPrompts
from distflow.util.arrays import Ints

PROMPT, RESPONSE, ROLLOUT = "prompt_tokens", "response_tokens", "rollout_logprobs"


def micro_batches(batch: Batch, index: Ints, budget: int, whole_groups: bool = False) -> list[Ints]:
    """Splits samples into micro-batches of at most `budget` tokens, largest first; a longer sample is alone.

    Samples of one prompt stay together where that fits; with `whole_groups`, always.
    """
    shared = batch[PROMPT].lengths[index]
    own = np.maximum(batch[RESPONSE].lengths[index] - 1, 0)
    prompt = batch.groups[index] if whole_groups else prompt_ids(batch[PROMPT].select(index))
    pieces: list[list[int]] = []  # samples of one prompt
    sizes: list[int] = []
    last = -1
    for i in np.lexsort((-own, prompt)).tolist():
        if prompt[i] == last and (whole_groups or sizes[-1] + own[i] <= budget):
            pieces[-1].append(i)
            sizes[-1] += int(own[i])
        else:
            pieces.append([i])
            sizes.append(int(shared[i] + own[i]))
        last = prompt[i]
    bins: list[list[int]] = []
    room: list[int] = []
    for k in np.argsort(-np.array(sizes), kind="stable").tolist():
        fits = next((b for b, r in enumerate(room) if r >= sizes[k]), None)
        if fits is None:
            bins.append(pieces[k])
            room.append(budget - sizes[k])
        else:
            bins[fits] += pieces[k]
            room[fits] -= sizes[k]
    return [index[b] for b in bins]


def prompt_ids(prompts: Ragged) -> Ints:
    """Returns a number for each sample, the same for samples of the same prompt."""
    known: dict[bytes, int] = {}
    return np.array([known.setdefault(p.numpy().tobytes(), len(known)) for p in prompts], np.int64)


@dataclass(frozen=True)
class Pack:
    """A micro-batch: sequences in one row, each a prompt and its response without the last token.

    A prompt is not repeated for its further responses. Samples without a response are left out.
    """

    index: Ints  # [samples]: their places in the batch, in the order of this pack
    tokens: Tensor  # [rows]
    positions: Tensor  # [rows]
    lengths: list[int]  # of the sequences, prompts included
    shared: SharedPrompts | None  # rows to whole sequences; None where they are the same
    keep: Tensor  # [responses]: the row that predicts each response token of the model's own
    targets: Tensor  # [responses]: these tokens
    responses: Tensor  # [samples]: how many they are
    per_token: Mapping[str, Tensor]  # [responses]
    per_sample: Mapping[str, Tensor]  # [samples]
    model_tokens: ModelTokens  # of the whole responses

    def to(self, device: torch.device) -> "Pack":
        if device.type == "cpu":
            return self
        moved = {f.name: getattr(self, f.name) for f in fields(self)}
        for name, value in moved.items():
            if isinstance(value, Tensor | SharedPrompts):
                moved[name] = value.to(device)
            elif isinstance(value, Mapping):
                moved[name] = {k: v.to(device) for k, v in value.items()}
        return Pack(**moved)


def pack(batch: Batch, index: Ints) -> Pack:
    """Packs some samples, sorted by length: attention computes equal lengths together."""
    index = index[np.argsort(-(batch[PROMPT].lengths + batch[RESPONSE].lengths)[index], kind="stable")]
    chosen = batch.select(index)
    responses: Ragged = chosen[RESPONSE]
    columns = {f: c for f, c in chosen.columns.items() if f not in (PROMPT, RESPONSE, MASK)}
    rows, model = _Rows(chosen[PROMPT], responses), ModelTokens.of(chosen)
    return Pack(
        index=index,
        tokens=rows.tokens(),
        positions=rows.positions(),
        lengths=rows.lengths(),
        shared=rows.shared(),
        keep=model.select(rows.keep()),
        targets=model.select(responses.joined()),
        responses=torch.from_numpy(model.lengths),
        per_token={f: model.select(c.joined()) for f, c in columns.items() if isinstance(c, Ragged)},
        per_sample={f: c for f, c in columns.items() if isinstance(c, Tensor)},
        model_tokens=model,
    )


class _Rows:
    """The rows of each sample that has a response: of its prompt, and of its response."""

    def __init__(self, prompts: Ragged, responses: Ragged) -> None:
        live = np.flatnonzero(responses.lengths)
        self.prompts, self.responses = prompts.select(live), responses.select(live)
        self.p, self.r = self.prompts.lengths, self.responses.lengths - 1
        _, first, same = np.unique(prompt_ids(self.prompts), return_index=True, return_inverse=True)
        self.first = np.zeros(len(live), bool)  # of the samples that share a prompt
        self.first[first] = True
        sizes = np.where(self.first, self.p, 0) + self.r
        self.count = int(sizes.sum())
        ends = np.cumsum(sizes)
        self.prompt_at = (ends - sizes)[first][same]
        self.response_at = ends - self.r

    def tokens(self) -> Tensor:
        if not self.count:
            return torch.zeros(1, dtype=torch.int64)  # a model is called with at least one token
        tokens = torch.empty(self.count, dtype=torch.int64)
        new = self.first
        tokens[_ranges(self.prompt_at[new], self.p[new])] = self.prompts.select(np.flatnonzero(new)).joined()
        tokens[_ranges(self.response_at, self.r)] = self.responses.values[_ranges(self.responses.starts, self.r)]
        return tokens

    def positions(self) -> Tensor:
        positions = torch.zeros(max(1, self.count), dtype=torch.int64)
        new = self.first
        positions[_ranges(self.prompt_at[new], self.p[new])] = _ranges(0 * self.p[new], self.p[new])
        positions[_ranges(self.response_at, self.r)] = _ranges(self.p, self.r)
        return positions

    def lengths(self) -> list[int]:
        lengths: list[int] = (self.p + self.r).tolist()
        return lengths or [1]

    def keep(self) -> Tensor:
        """Returns the row that predicts each response token: for the first one, the last row of the prompt."""
        sizes = self.r + 1
        at = np.cumsum(sizes) - sizes
        keep = torch.empty(int(sizes.sum()), dtype=torch.int64)
        keep[torch.from_numpy(at)] = torch.from_numpy(self.prompt_at + self.p - 1)
        keep[_ranges(at + 1, self.r)] = _ranges(self.response_at, self.r)
        return keep

    def shared(self) -> SharedPrompts | None:
        if self.first.all():
            return None
        new, old = self.first, ~self.first
        sizes = self.p + self.r
        at = np.cumsum(sizes) - sizes
        rows = torch.empty(int(sizes.sum()), dtype=torch.int64)
        rows[_ranges(at, self.p)] = _ranges(self.prompt_at, self.p)
        rows[_ranges(at + self.p, self.r)] = _ranges(self.response_at, self.r)
        places = torch.empty(self.count, dtype=torch.int64)
        places[_ranges(self.prompt_at[new], self.p[new])] = _ranges(at[new], self.p[new])
        places[_ranges(self.response_at, self.r)] = _ranges(at + self.p, self.r)
        return SharedPrompts(rows, places, _ranges(at[old], self.p[old]))


def _ranges(starts: Ints, counts: Ints) -> Tensor:
    """Concatenates `count` numbers from `start` on for each pair."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    return torch.from_numpy(np.repeat(starts - ends + counts, counts) + np.arange(total))


def empty_pack() -> Pack:
    """Returns a pack without samples: a rank that has run out of samples still takes part in the collectives."""
    one, none = torch.zeros(1, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
    return Pack(none.numpy(), one, one, [1], None, none, none, none, {}, {}, ModelTokens(none.numpy()))
