"""What packs of a vision-language model have beside tokens: positions along several axes, and each prompt's images."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from distflow.model.attention import SharedPrompts
from distflow.model.images import Images, Processed, join_images
from distflow.plan.field_bytes import IMAGES
from distflow.train.packing import Pack, Rows, ranges


class Vision:
    """Completes packs for `model`."""

    def __init__(self, model: PreTrainedModel, images: Images) -> None:
        self.model, self.images = model, images

    def complete(self, pack: Pack, rows: Rows) -> Pack:
        """Adds the images of prompts, and the positions that follow from them; `rows` are those of `pack`."""
        own, tokens = ranges(rows.own_at, rows.own), pack.tokens.clone()
        tokens[own] = self.images.as_read(tokens[own])
        pack = replace(pack, tokens=tokens)
        prompts = [self._prompt(rows, i) for i in np.flatnonzero(rows.new).tolist()]
        every = [image for _, images in prompts for image in images]
        if not every:
            return self.with_smallest(pack)
        whole = [self.images.positions(self.model, tokens, images) for tokens, images in prompts]
        axes = whole[0].shape[:-1]
        positions = pack.positions.expand(*axes, -1).clone()
        of_prompt = dict(zip(rows.prompt_at[rows.new].tolist(), whole, strict=True))
        for at, of in of_prompt.items():
            positions[..., at : at + of.shape[-1]] = of
        s = rows.sequences
        for i, (sample, shared) in enumerate(zip(s.sample.tolist(), s.shared.tolist(), strict=True)):
            of = of_prompt[int(rows.prompt_at[sample])][..., :shared]
            at, count = int(rows.own_at[i]), int(rows.own[i])
            if of.shape[-1]:
                positions[..., at : at + count] += int(of.max()) + 1 - of.shape[-1]
        return replace(pack, positions=positions, images=join_images([i.tensors for i in every]))

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

    def _prompt(self, rows: Rows, sample: int) -> tuple[Tensor, list[Processed]]:
        references = rows.batch[IMAGES][sample] if IMAGES in rows.batch else []
        return rows.prompts[sample], self.images.of(references)


def _with_rows(shared: SharedPrompts, rows: int, added: int) -> SharedPrompts:
    """Adds a sequence that shares nothing."""
    more, places = torch.arange(added), len(shared.rows)
    return SharedPrompts(
        torch.cat([shared.rows, rows + more]),
        torch.cat([shared.first_places, places + more]),
        shared.repeats,
        (*shared.own, added),
    )
