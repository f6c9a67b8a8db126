"""Packs samples into micro-batches, and a micro-batch into one row of tokens, without padding.

All responses of a prompt share its tokens, all sequences of a sample their common beginning. Tokens that the model did
not sample are only context.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distflow.batch.batch import Batch, Ragged
from distflow.batch.branches import BRANCHES, Sequences
from distflow.batch.response_mask import MASK, ModelTokens
from distflow.model.attention import SharedPrompts
from distflow.model.experts import PROMPT_EXPERTS, RESPONSE_EXPERTS
from distflow.plan.field_bytes import IMAGES, PROMPT_IMAGES
from distflow.util.arrays import Ints
from distflow.util.copies import to_device

PROMPT, RESPONSE, ROLLOUT, OLD = "prompt_tokens", "response_tokens", "rollout_logprobs", "old_logprobs"
REFERENCE, EMA_LOGPROBS = "ref_logprobs", "ema_logprobs"
TEACHER_TOP_IDS, TEACHER_TOP_LOGPROBS = "teacher_top_ids", "teacher_top_logprobs"
_NOT_OF_TOKENS = {PROMPT, RESPONSE, MASK, BRANCHES, PROMPT_EXPERTS, RESPONSE_EXPERTS}  # of the model's own


def micro_batches(batch: Batch, index: Ints, budget: int, whole_groups: bool = False) -> list[Ints]:
    """Splits samples into micro-batches of at most `budget` tokens, largest first; a longer sample is alone.

    Samples of one prompt stay together where that fits; with `whole_groups`, always.
    """
    shared = batch[PROMPT].lengths[index]
    own = np.maximum(batch[RESPONSE].lengths[index] - 1, 0)
    prompt = batch.groups[index] if whole_groups else prompt_ids(batch.select(index))
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


def prompt_ids(batch: Batch) -> Ints:
    """Returns a number for each sample, the same for samples of the same prompt with the same images."""
    known: dict[Any, int] = {}
    given = batch.columns.get(PROMPT_IMAGES, batch.columns.get(IMAGES))
    images = map(tuple, given) if given else repeat(())
    keys = ((p.numpy().tobytes(), i) for p, i in zip(batch[PROMPT], images, strict=False))
    return np.array([known.setdefault(key, len(known)) for key in keys], np.int64)


@dataclass(frozen=True)
class Pack:
    """A micro-batch: sequences in one row, each a prompt and its response without the last token.

    What sequences share is there once: a prompt of several responses, the beginning of a sample's branches. Samples
    without a response are left out.
    """

    index: Ints  # [samples]: their places in the batch, in the order of this pack
    tokens: Tensor  # [rows]
    positions: Tensor  # [rows], or [axes, rows]
    lengths: list[int]  # of the sequences, prompts included
    shared: SharedPrompts | None  # rows to whole sequences; None where they are the same
    keep: Tensor  # [responses]: the row that predicts each response token of the model's own
    targets: Tensor  # [responses]: these tokens
    responses: Tensor  # [samples]: how many they are
    sequences: Tensor  # [sequences]: and how many of each
    per_token: Mapping[str, Tensor]  # [responses]
    per_sample: Mapping[str, Tensor]  # [samples]
    model_tokens: ModelTokens  # of the whole responses
    experts: Tensor | None = None  # [rows, layers, top-k]: the choices of generation; negative: none
    images: Mapping[str, Tensor] = field(default_factory=dict)  # the model's arguments for those of the prompts
    places: Tensor | None = None  # [own responses]: the ones that this rank predicts, if several divide the rows

    @property
    def candidates(self) -> Tensor | None:
        """Further tokens whose log-probs are wanted at each place: [responses, k]."""
        ids = self.per_token.get(TEACHER_TOP_IDS)
        return None if ids is None else ids.long()

    def to(self, device: torch.device) -> "Pack":
        if device.type == "cpu":
            return self
        moved = {f.name: getattr(self, f.name) for f in fields(self)}
        for name, value in moved.items():
            if isinstance(value, Tensor):
                moved[name] = to_device(value, device)
            elif isinstance(value, SharedPrompts):
                moved[name] = value.to(device)
            elif isinstance(value, Mapping):
                moved[name] = {k: to_device(v, device) for k, v in value.items()}
        return Pack(**moved)

    def divided(self, rank: int, ranks: int) -> "Pack":
        """Notes which responses the rows of one of the ranks predict: on the host, which would wait for a device."""
        if ranks == 1:
            return self
        first, size = self._rows_of(rank, ranks)
        return replace(self, places=((self.keep >= first) & (self.keep < first + size)).nonzero()[:, 0])

    def _rows_of(self, rank: int, ranks: int) -> tuple[int, int]:
        """Returns the first row of a rank, and how many it has."""
        size = -(-len(self.tokens) // ranks)
        return rank * size, size

    def share(self, rank: int, ranks: int) -> "Share":
        """Returns the part of one of the ranks that divide the rows, equally, wherever sequences begin and end."""
        if ranks == 1:
            return Share(self.tokens, self.positions, self.keep, self.targets, None, self.candidates, self.experts)
        assert self.places is not None
        places, (first, size) = self.places, self._rows_of(rank, ranks)

        def rows(x: Tensor) -> Tensor:
            own = x[first : first + size]
            return torch.nn.functional.pad(own, (*(0,) * (2 * (x.ndim - 1) + 1), size - len(own)))

        candidates = None if self.candidates is None else self.candidates[places]
        experts = None if self.experts is None else rows(self.experts)
        own = rows(self.tokens), rows(self.positions), self.keep[places] - first, self.targets[places]
        return Share(*own, places, candidates, experts)


@dataclass(frozen=True)
class Share:
    """What one of the ranks that divide the rows of a pack has of it."""

    tokens: Tensor  # [own rows]; the last ones of the last rank may be padding
    positions: Tensor  # [own rows]
    keep: Tensor  # [own responses]: the own row that predicts each response token
    targets: Tensor  # [own responses]
    places: Tensor | None  # [own responses]: which of the pack's they are; None: all
    candidates: Tensor | None = None  # [own responses, k]: further tokens whose log-probs are wanted
    experts: Tensor | None = None  # [own rows, layers, top-k]


def pack(batch: Batch, index: Ints) -> Pack:
    """Packs some samples, sorted by length: attention computes equal lengths together."""
    index = index[np.argsort(-(batch[PROMPT].lengths + batch[RESPONSE].lengths)[index], kind="stable")]
    chosen = batch.select(index)
    responses: Ragged = chosen[RESPONSE]
    columns = {f: c for f, c in chosen.columns.items() if f not in _NOT_OF_TOKENS}
    rows, model = Rows(chosen), ModelTokens.of(chosen)
    return Pack(
        index=index,
        tokens=rows.tokens(),
        positions=rows.positions(),
        lengths=rows.lengths(),
        shared=rows.shared(),
        keep=model.select(rows.keep()),
        targets=model.select(responses.joined()),
        responses=torch.from_numpy(model.lengths),
        sequences=torch.from_numpy(rows.sequences.model_tokens(model)),
        per_token={f: model.select(c.joined()) for f, c in columns.items() if isinstance(c, Ragged)},
        per_sample={f: c for f, c in columns.items() if isinstance(c, Tensor)},
        model_tokens=model,
        experts=rows.experts() if RESPONSE_EXPERTS in chosen else None,
    )


class Rows:
    """The rows of each sample that has a response: of its prompt, and of the own tokens of its sequences."""

    def __init__(self, batch: Batch) -> None:
        self.batch = live = batch.select(np.flatnonzero(batch[RESPONSE].lengths))
        self.prompts, self.responses, self.sequences = live[PROMPT], live[RESPONSE], Sequences.of(live)
        s, is_first = self.sequences, self.sequences.is_first
        size = s.shared + s.length
        # A last token predicts nothing, unless a branch goes on behind it.
        goes_on = ~is_first & (s.shared == size[s.parent])
        self.own = s.length - 1
        self.own[s.parent[goes_on]] = s.length[s.parent[goes_on]]
        _, first, same = np.unique(prompt_ids(live), return_index=True, return_inverse=True)
        self.new = np.zeros(len(live), bool)  # the first sample of each prompt
        self.new[first] = True
        self.p = self.prompts.lengths
        before = np.zeros(len(s.sample), np.int64)
        before[is_first] = np.where(self.new, self.p, 0)
        ends = np.cumsum(before + self.own)
        self.count = int(ends[-1]) if len(ends) else 0
        self.own_at = ends - self.own
        self.prompt_at = (self.own_at[is_first] - self.p)[first][same]
        self.paths = _Paths.of(s, self.own, before, self.own_at, self.prompt_at)

    def tokens(self) -> Tensor:
        if not self.count:
            return torch.zeros(1, dtype=torch.int64)  # a model is called with at least one token
        tokens, s = torch.empty(self.count, dtype=torch.int64), self.sequences
        new = self.new
        tokens[ranges(self.prompt_at[new], self.p[new])] = self.prompts.select(np.flatnonzero(new)).joined()
        own = ranges(self.responses.starts[s.sample] + s.start, self.own)
        tokens[ranges(self.own_at, self.own)] = self.responses.values[own]
        return tokens

    def experts(self) -> Tensor:
        prompt: Ragged = self.batch[PROMPT_EXPERTS]
        response: Ragged = self.batch[RESPONSE_EXPERTS]
        s, new = self.sequences, self.new
        experts = response.values.new_full((max(1, self.count), *response.item_shape), -1)
        experts[ranges(self.prompt_at[new], self.p[new])] = prompt.select(np.flatnonzero(new)).joined()
        starts = np.cumsum(response.lengths) - response.lengths
        experts[ranges(self.own_at, self.own)] = response.joined()[ranges(starts[s.sample] + s.start, self.own)]
        return experts

    def positions(self) -> Tensor:
        positions = torch.zeros(max(1, self.count), dtype=torch.int64)
        new = self.new
        positions[ranges(self.prompt_at[new], self.p[new])] = ranges(0 * self.p[new], self.p[new])
        positions[ranges(self.own_at, self.own)] = ranges(self.sequences.shared, self.own)
        return positions

    def lengths(self) -> list[int]:
        lengths: list[int] = self.paths.lengths.tolist()
        return lengths or [1]

    def keep(self) -> Tensor:
        """Returns the row that predicts each response token: for the first of a sequence, the last that it shares."""
        own = self.sequences.length
        at = np.cumsum(own) - own
        keep = torch.empty(int(own.sum()), dtype=torch.int64)
        keep[torch.from_numpy(at)] = torch.from_numpy(self.paths.last_shared)
        keep[ranges(at + 1, own - 1)] = ranges(self.own_at, own - 1)
        return keep

    def shared(self) -> SharedPrompts | None:
        if self.new.all() and self.sequences.is_first.all():
            return None
        rows = ranges(self.paths.starts, self.paths.counts)
        places = torch.full((self.count,), len(rows)).scatter_reduce(0, rows, torch.arange(len(rows)), "amin")
        repeats = torch.ones(len(rows), dtype=torch.bool)
        repeats[places] = False
        return SharedPrompts(rows, places, repeats.nonzero()[:, 0], tuple(self.paths.own.tolist()))


@dataclass(frozen=True)
class _Paths:
    """The rows of each whole sequence, as ranges one after the other; one that has no rows is left out."""

    starts: Ints  # [ranges]
    counts: Ints  # [ranges]
    lengths: Ints  # [sequences]
    own: Ints  # [sequences]: how many of these are in no earlier one; they are its last
    last_shared: Ints  # [sequences]: the last row before its own tokens; 0 where nothing is shared

    @classmethod
    def of(cls, s: Sequences, own: Ints, prompt: Ints, own_at: Ints, prompt_at: Ints) -> "_Paths":
        """`own` rows of each sequence are at `own_at`; before them, of some first ones, those of the `prompt`."""
        lengths = s.shared + own
        some = lengths > 0
        if s.is_first.all():
            starts = np.stack([prompt_at, own_at], 1).ravel()
            counts = np.stack([s.shared, own], 1).ravel()
            return cls(starts, counts, lengths, prompt + own, prompt_at + s.shared - 1)
        paths: list[list[tuple[int, int]]] = []
        last = np.zeros(len(s.sample), np.int64)
        for i, (sample, parent) in enumerate(zip(s.sample.tolist(), s.parent.tolist(), strict=True)):
            shared = int(s.shared[i])
            before = [(int(prompt_at[sample]), shared)] if parent == i else _cut(paths[parent], shared)
            last[i] = sum(before[-1]) - 1 if before else 0
            paths.append([*before, (int(own_at[i]), int(own[i]))])
        starts, counts = np.array([r for path in paths for r in path], np.int64).T
        return cls(starts, counts, lengths[some], (prompt + own)[some], last)


def _cut(path: list[tuple[int, int]], tokens: int) -> list[tuple[int, int]]:
    """Returns the first tokens of a path."""
    result = []
    for start, count in path:
        if tokens <= 0:
            break
        result.append((start, min(count, tokens)))
        tokens -= count
    return result


def ranges(starts: Ints, counts: Ints) -> Tensor:
    """Concatenates `count` numbers from `start` on for each pair."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    return torch.from_numpy(np.repeat(starts - ends + counts, counts) + np.arange(total))


def empty_pack() -> Pack:
    """Returns a pack without samples: a rank that has run out of samples still takes part in the collectives."""
    one, none = torch.zeros(1, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
    return Pack(none.numpy(), one, one, [1], None, none, none, none, none, {}, {}, ModelTokens(none.numpy()))
