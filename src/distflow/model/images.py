"""Images of prompts on one worker: read where they are needed, processed once, and given to the model beside tokens."""

import io
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from distflow.batch.batch import Column
from distflow.dataset.image_rows import image_of_row, row_of
from distflow.dataset.view import DatasetView
from distflow.errors import ConfigError, DataError, cut, short_reason
from distflow.model.processor import reads_images
from distflow.model.source import Source
from distflow.util import data_url
from distflow.util.extras import how_to_install

Rows = Mapping[str, Callable[[int], Mapping[str, Any]]]  # data set → reads a row of it, as it is in its file
References = Sequence[str]  # of the images of a sequence, in the order of its tokens

_PICTURES, _PICTURE = 8, 256  # of a sample that is recorded: how many, and pixels along each side


class Place(NamedTuple):
    """The place of an image in a sequence: from its first token to behind its last."""

    start: int
    end: int
    reference: str


@dataclass(frozen=True)
class Processed:
    """An image as a model gets it."""

    tokens: tuple[int, ...]  # that stand for it in a prompt
    tensors: Mapping[str, Tensor]  # by the model's arguments


class Images:
    """The images of a model's prompts. The result for one is kept until it is freed."""

    def __init__(self, processor: Any, rows: Rows) -> None:
        self.processor, self.rows = processor, rows
        self.token: int = processor.image_token_id
        self._processed: dict[str, Processed] = {}
        self._smallest: Processed | None = None
        self._row: tuple[tuple[str, int], Mapping[str, Any]] | None = None  # read last: it may hold several images

    def read(self, reference: str) -> bytes:
        """Returns an encoded image."""
        if reference.startswith(data_url.PREFIX):
            try:
                return data_url.decode(reference)
            except ValueError as e:
                raise DataError(f"the image {_name(reference)} is no data URL ({e})") from None
        place = row_of(reference)
        if place is None:
            try:
                return Path(reference).read_bytes()
            except OSError as e:
                raise DataError(f"the image {cut(reference, 300)} cannot be read: {e.strerror}") from None
        name, number, index = place
        row = self._row
        if row is None or row[0] != (name, number):
            row = self._row = (name, number), self.rows[name](number)
        return image_of_row(row[1], index)

    def open(self, reference: str) -> Any:
        """Returns an image as Pillow has it, in RGB; refuses one that is broken, or enormous when it is decoded."""
        pil = _pillow()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", pil.DecompressionBombWarning)
                image = pil.open(io.BytesIO(self.read(reference)))
                return image.convert("RGB")
        except (pil.DecompressionBombWarning, pil.DecompressionBombError):
            raise DataError(
                f"the image {_name(reference)} has more than {pil.MAX_IMAGE_PIXELS:,} pixels; scale it down"
            ) from None
        except (OSError, ValueError, SyntaxError, EOFError) as e:
            raise DataError(f"the image {_name(reference)} cannot be decoded: {cut(short_reason(e))}") from None

    def processed(self, reference: str) -> Processed:
        image = self._processed.get(reference)
        if image is None:
            image = self._processed[reference] = self._process(reference)
        return image

    def forget(self, references: Iterable[str]) -> None:
        """Frees what was made of images."""
        for reference in references:
            self._processed.pop(reference, None)
        self._row = None

    def free(self, column: Column, left: Sequence[Column]) -> None:
        """Frees the images of a column of references that no other column, of those `left`, refers to."""
        references, kept = ({r for c in columns for row in c for r in row} for columns in ([column], left))
        self.forget(references - kept)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for p in self._processed.values() for t in p.tensors.values())

    def expand(self, tokens: Sequence[int], references: References) -> list[int]:
        """Returns the tokens of a prompt with those of each image in place of the one that its template wrote."""
        places = sum(t == self.token for t in tokens)
        if places != len(references):
            raise DataError(f"the prompt has {places} places for images and {len(references)} images")
        images = iter(references)
        return [
            t for token in tokens for t in (self.processed(next(images)).tokens if token == self.token else [token])
        ]

    def places(self, tokens: Sequence[int], references: References) -> list[Place]:
        """Returns where in these tokens each of their images is."""
        at = iter([i for i, token in enumerate(tokens) if token == self.token])
        places = []
        for reference in references:
            own = list(islice(at, self.processed(reference).tokens.count(self.token)))
            if not own:
                raise DataError(f"the image {_name(reference)} has no place in the tokens of its prompt")
            places.append(Place(own[0], own[-1] + 1, reference))
        if next(at, None) is not None:
            raise DataError(f"there are more tokens of images than those of the {len(references)} images")
        return places

    def first(self, tokens: Tensor, images: Sequence[Processed]) -> list[Processed]:
        """Returns those of some images that are in these tokens: the first ones."""
        left, found = int((tokens == self.token).sum()), []
        for image in images:
            if left <= 0:
                break
            found.append(image)
            left -= image.tokens.count(self.token)
        return found

    def as_read(self, sampled: Tensor) -> Tensor:
        """Returns sampled tokens as the model reads them: none of them stands for an image."""
        return sampled.masked_fill(sampled == self.token, self.end)

    @property
    def end(self) -> int:
        """Returns the end-of-sequence token, as which the model reads a token of an image that it has sampled."""
        token: int = self.processor.tokenizer.eos_token_id
        return token

    def of(self, references: References) -> list[Processed]:
        return [self.processed(r) for r in references]

    def positions(self, model: PreTrainedModel, tokens: Tensor, images: Sequence[Processed]) -> Tensor:
        """Returns the position of each token of a whole sequence, [tokens], or [axes, tokens] of a model with several.

        The model computes them itself. A token that follows what is here is one behind the last, on each axis.
        """
        index = getattr(model.base_model, "get_rope_index", None)
        if index is None:
            return torch.arange(len(tokens))
        grids = join_images([{k: t for k, t in i.tensors.items() if k.endswith("grid_thw")} for i in images])
        places, _ = index(tokens[None], mm_token_type_ids=(tokens == self.token).int()[None], **grids)
        positions: Tensor = places[:, 0]
        return positions

    def smallest(self) -> Processed:
        """Returns an image that takes few tokens: a rank without images gives it to the tower, so that all call it."""
        if self._smallest is None:
            self._smallest = self._of(_pillow().new("RGB", (1, 1)))
        return self._smallest

    def pictures(self, references: References) -> list[str]:
        """Returns small copies of the first images, as data URLs, for a page."""
        return [self._picture(r) for r in references[:_PICTURES]]

    def _picture(self, reference: str) -> str:
        image = self.open(reference)
        image.thumbnail((_PICTURE, _PICTURE))
        out = io.BytesIO()
        kind = "PNG" if max(image.size) <= _PICTURE // 4 else "JPEG"
        image.save(out, kind)
        return data_url.encode(out.getvalue(), f"image/{kind.lower()}")

    def _process(self, reference: str) -> Processed:
        return self._of(self.open(reference), _name(reference))

    def _of(self, image: Any, name: str = "") -> Processed:
        processor = self.processor
        options = getattr(processor.valid_processor_kwargs, "_defaults", {}).get("images_kwargs", {})
        try:
            made: Any = processor.image_processor([image], return_tensors="pt", **options)
            text = processor.replace_image_token(made, image_idx=0)
        except (ValueError, TypeError, ZeroDivisionError) as e:
            raise DataError(f"the image {name} does not suit the model's processor: {short_reason(e)}") from None
        tokens = processor.tokenizer(text, add_special_tokens=False, return_attention_mask=False)["input_ids"]
        tensors = {k: v for k, v in made.items() if isinstance(v, Tensor) and k not in ("rows", "cols")}
        return Processed(tuple(tokens), tensors)


def open_images(source: Source, rows: DatasetView, held_out: DatasetView | None) -> Images | None:
    """Returns the images of these rows as the model gets them; None for a model that reads none."""
    if source.processor is None:
        return None
    sets = {view.images: view.whole_row for view in (rows, held_out) if view and view.images}
    return Images(source.processor, sets)


def vision_tower(model: PreTrainedModel) -> nn.Module:
    """Returns the part of a model that makes embeddings of pixels."""
    if not reads_images(model.config):
        raise ConfigError(f"train.freeze: a {model.config.model_type} model has no vision tower; leave it out")
    tower: nn.Module = model.get_encoder("image")
    return tower


def batch_of_one(positions: Tensor) -> Tensor:
    """[tokens] → [1, tokens], and [axes, tokens] → [axes, 1, tokens]"""
    return positions.unsqueeze(-2)


def join_images(images: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Joins the arguments of images: along the first dimension, or the second where the first is of prompts.

    Images of different height or width are padded with zeros, as the processor pads those of one prompt.
    """
    joined: dict[str, Tensor] = {}
    first = images[0] if images else {}
    by_prompt = "pixel_values" in first and first["pixel_values"].ndim == 5  # [prompts, images, …], with one prompt
    for name in first:
        tensors = [image[name] for image in images]
        if by_prompt:
            height, width = (max(t.shape[d] for t in tensors) for d in (-2, -1))
            tensors = [torch.nn.functional.pad(t, (0, width - t.shape[-1], 0, height - t.shape[-2])) for t in tensors]
        joined[name] = tensors[0] if len(tensors) == 1 else torch.cat(tensors, 1 if by_prompt else 0)
    return joined


def _name(reference: str) -> str:
    if reference.startswith(data_url.PREFIX):
        return cut(reference, 40)
    place = row_of(reference)
    return cut(reference, 300) if place is None else f"{place[2] + 1} of the row"


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise ConfigError(f"model: it reads images, and Pillow is not installed; {how_to_install('images')}") from None
    return Image
