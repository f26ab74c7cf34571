"""What a page about single images needs to know, without knowing of pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from jaxtyping import Float, UInt8
from PIL import Image
from torch import Tensor

from patchproof.data import BadImageError, ImageSource, decode, preprocess
from patchproof.defenses import PatchCleanser
from patchproof.explore._patch import optimise
from patchproof.explore._rounds import Rounds, watch
from patchproof.explore._table import PairTable, pair_table
from patchproof.geometry import Rect
from patchproof.masking import as_images, fill_colour, occlude
from patchproof.records import Record
from patchproof.types import CheckError, InputError, Preprocessing, Size

UPLOAD_LIMIT = 20 * 1024**2
"""Larger files are refused unread, in bytes."""

KINDS: dict[str, Callable[[Record], bool]] = {
    "all": lambda record: True,
    "certified": lambda record: bool(record.certified),
    "not certified": lambda record: not record.certified,
    "answered wrong": lambda record: not record.defended,
}


@dataclass(frozen=True)
class Choice:
    """An image that can be picked: its place in the source, its label (an output of the classifier), and the record
    of a run about it."""

    index: int
    label: int
    record: Record | None = None


@dataclass(frozen=True)
class Images:
    """The images on offer."""

    source: ImageSource
    choices: tuple[Choice, ...]

    @property
    def kinds(self) -> tuple[str, ...]:
        """What they can be sorted by: records, where there are any."""
        return tuple(KINDS) if any(choice.record for choice in self.choices) else ("all",)

    def of_kind(self, kind: str) -> tuple[Choice, ...]:
        if kind == "all":
            return self.choices
        return tuple(c for c in self.choices if c.record is not None and KINDS[kind](c.record))


@dataclass(frozen=True)
class Explorer:
    """A defended classifier, how images reach it, and the words for its outputs."""

    defense: PatchCleanser
    preprocessing: Preprocessing
    names: tuple[str, ...]
    title: str
    images: Images | None = None
    notices: tuple[str, ...] = ()
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def size(self) -> Size:
        return self.defense.masks.image_size

    def pixels(self, choice: Choice) -> UInt8[Tensor, "3 h w"]:
        """The network input of an image on offer, in 8 bits."""
        if self.images is None:
            raise InputError("no images are on offer; drop in one of your own")
        source, record = self.images.source, choice.record
        if record is not None and source.path(choice.index) != record.path:
            raise CheckError(f"image {choice.index} is {source.path(choice.index)}, the record is about {record.path}")
        return self._fitting(preprocess(source.load(choice.index), self.preprocessing), source.path(choice.index))

    def own(self, file: Path) -> UInt8[Tensor, "3 h w"]:
        """The network input of a file of anybody's, resized and cropped as the run's images are."""
        return self._fitting(preprocess(self.picture(file), self.preprocessing), file.name)

    def picture(self, file: Path) -> Image.Image:
        """A file of anybody's in RGB; too large, broken, or no image: a PatchproofError that says so."""
        size = file.stat().st_size
        if size > UPLOAD_LIMIT:
            raise InputError(
                f"{file.name} has {size / 1024**2:.1f} MB, at most {UPLOAD_LIMIT // 1024**2} MB are taken; shrink it"
            )
        try:
            return decode(file)
        except BadImageError as error:
            raise InputError(f"cannot use {file.name}: {error.reason}") from error

    def _fitting(self, pixels: Tensor, name: str) -> UInt8[Tensor, "3 h w"]:
        if tuple(pixels.shape[1:]) != self.size:
            raise InputError(f"{name} becomes {tuple(pixels.shape[1:])} pixels, the masks are for {self.size}")
        return pixels

    def image(self, pixels: UInt8[Tensor, "3 h w"]) -> Float[Tensor, "3 h w"]:
        return as_images(pixels[None], self.device)[0]

    def table(self, pixels: UInt8[Tensor, "3 h w"], label: int | None = None) -> PairTable:
        """The two-mask table about `label`, or about the defended answer."""
        return pair_table(self.defense, self.image(pixels), label)

    def rounds(self, pixels: UInt8[Tensor, "3 h w"]) -> Rounds:
        """What double masking does with this image."""
        return watch(self.defense, self.image(pixels))

    def masked(self, pixels: UInt8[Tensor, "3 h w"], first: int, second: int) -> UInt8[Tensor, "3 h w"]:
        """x ⊙ m_first ⊙ m_second in 8 bits, for the eye."""
        keep = self.defense.masks.keep()
        image = as_images(pixels[None], "cpu")
        hidden = occlude(image, keep[first] & keep[second], fill_colour(self.defense.classifier, image))
        return hidden[0].mul(255).round().to(torch.uint8)

    @property
    def fill(self) -> tuple[int, int, int]:
        """The colour of a mask in 8 bits."""
        colour = fill_colour(self.defense.classifier, torch.empty(0, 3, 1, 1)).flatten()
        red, green, blue = colour.mul(255).round().int().tolist()
        return red, green, blue

    def optimised(
        self, pixels: UInt8[Tensor, "3 h w"], rect: Rect, label: int, *, defended: bool, steps: int, seed: int
    ) -> UInt8[Tensor, "3 p q"]:
        """A patch for this place that pulls the classifier, or the defence's first round, away from `label`."""
        generator = torch.Generator().manual_seed(seed)
        return optimise(
            self.defense, pixels, rect, label, defended=defended, steps=steps, generator=generator, device=self.device
        )
