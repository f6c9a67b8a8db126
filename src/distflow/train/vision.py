"""The parts of packs of a vision-language model beside tokens: positions along several axes, and images."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from distflow.batch.batch import Ragged
from distflow.batch.response_mask import MASK
from distflow.model.attention import SharedPrompts
from distflow.model.images import Images, Processed, join_images
from distflow.plan.field_bytes import IMAGES, PROMPT_IMAGES, RESPONSE_IMAGES
from distflow.train.packing import Pack, Rows, ranges
from distflow.util.arrays import Ints


class Vision:
    """Completes packs for `model`."""

    def __init__(self, model: PreTrainedModel, images: Images) -> None:
        self.model, self.images = model, images

    def complete(self, pack: Pack, rows: Rows) -> Pack:
        """Adds the images of the sequences, and the positions that follow from them; `rows` are those of `pack`."""
        pack = replace(pack, tokens=self._as_read(pack.tokens, rows))
        prompts, own = self._of_prompts(rows), self._of_sequences(pack.tokens, rows)
        is_first, samples = rows.sequences.is_first, rows.sequences.sample.tolist()
        every: list[Processed] = []  # in the order of rows
        for i, sample in enumerate(samples):
            every += [*(prompts[sample] if is_first[i] and rows.new[sample] else ()), *own[i]]
        if not every:
            return self.with_smallest(pack)
        positions = self._positions(pack, rows, prompts, own)
        return replace(pack, positions=positions, images=join_images([i.tensors for i in every]))

    def _positions(
        self, pack: Pack, rows: Rows, prompts: Sequence[list[Processed]], own: Sequence[list[Processed]]
    ) -> Tensor:
        s, of_prompt = rows.sequences, dict[int, Tensor]()
        for sample in np.flatnonzero(rows.new).tolist():
            whole = self.images.positions(self.model, rows.prompts[sample], prompts[sample])
            of_prompt[int(rows.prompt_at[sample])] = whole
        positions = pack.positions.expand(*whole.shape[:-1], -1).clone()
        for at, of in of_prompt.items():
            positions[..., at : at + of.shape[-1]] = of
        seeing = {sample for sample, images in zip(s.sample.tolist(), own, strict=True) if images}
        paths: dict[int, tuple[Tensor, list[Processed]]] = {}  # whole sequences of samples with images in responses
        for i, (sample, shared) in enumerate(zip(s.sample.tolist(), s.shared.tolist(), strict=True)):
            at, count = int(rows.own_at[i]), int(rows.own[i])
            if sample in seeing:
                before, images = (rows.prompts[sample], prompts[sample]) if s.parent[i] == i else paths[s.parent[i]]
                path = torch.cat([before[:shared], pack.tokens[at : at + count]])
                paths[i] = path, [*self.images.first(path[:shared], images), *own[i]]
                positions[..., at : at + count] = self.images.positions(self.model, *paths[i])[..., shared:]
                continue
            of = of_prompt[int(rows.prompt_at[sample])][..., :shared]
            if of.shape[-1]:
                positions[..., at : at + count] += int(of.max()) + 1 - of.shape[-1]
        return positions

    def _as_read(self, tokens: Tensor, rows: Rows) -> Tensor:
        """Returns the rows as the model reads them: no token that it sampled stands for an image."""
        own, s = ranges(rows.own_at, rows.own), rows.sequences
        read, mask = self.images.as_read(tokens[own]), rows.batch.columns.get(MASK)
        if isinstance(mask, Ragged):
            sampled = mask.joined().bool()[ranges(_starts(mask.lengths)[s.sample] + s.start, rows.own)]
            read = torch.where(sampled, read, tokens[own])
        tokens = tokens.clone()
        tokens[own] = read
        return tokens

    def _of_prompts(self, rows: Rows) -> list[list[Processed]]:
        """Returns the images of each sample's prompt."""
        return self._of_field(PROMPT_IMAGES if PROMPT_IMAGES in rows.batch else IMAGES, rows)

    def _of_sequences(self, tokens: Tensor, rows: Rows) -> list[list[Processed]]:
        """Returns the images in the own tokens of each sequence: what an environment has shown."""
        rest, result = self._of_field(RESPONSE_IMAGES, rows), list[list[Processed]]()
        for i, sample in enumerate(rows.sequences.sample.tolist()):
            at, count = int(rows.own_at[i]), int(rows.own[i])
            result.append(self.images.first(tokens[at : at + count], rest[sample]) if rest[sample] else [])
            rest[sample] = rest[sample][len(result[i]) :]
        return result

    def _of_field(self, name: str, rows: Rows) -> list[list[Processed]]:
        references: Any = rows.batch.columns.get(name)
        return [self.images.of(references[i]) if references else [] for i in range(len(rows.batch))]

    def with_smallest(self, pack: Pack) -> Pack:
        """Adds a small image as a sequence that nothing is read of: its rank calls the vision tower like all others."""
        image = self.images.smallest()
        tokens = torch.tensor(image.tokens)
        of = self.images.positions(self.model, tokens, [image])
        positions = torch.cat([pack.positions.expand(*of.shape[:-1], -1), of], -1)
        rows, added = len(pack.tokens), len(tokens)
        shared = pack.shared and _with_rows(pack.shared, rows, added)
        return replace(
            pack,
            tokens=torch.cat([pack.tokens, tokens]),
            positions=positions,
            lengths=[*pack.lengths, added],
            shared=shared,
            images=dict(image.tensors),
        )


def _starts(lengths: Ints) -> Ints:
    return np.cumsum(lengths) - lengths


def _with_rows(shared: SharedPrompts, rows: int, added: int) -> SharedPrompts:
    """Adds a sequence that shares nothing."""
    more, places = torch.arange(added), len(shared.rows)
    return SharedPrompts(
        torch.cat([shared.rows, rows + more]),
        torch.cat([shared.first_places, places + more]),
        shared.repeats,
        (*shared.own, added),
    )
