"""An explorer without its page: single images, a defence, and the patches to put on them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image
from torch import Tensor

from patchproof.attacks import AttackPlan, GradientAttack, Misclassify, Undefended, image_generator
from patchproof.data import BadImageError, ImageSource, decode, is_turned, preprocess
from patchproof.defenses import PatchCleanser, device_of
from patchproof.explore._findings import Cell, Finding, Rounds, record_words, study, watch
from patchproof.geometry import MaskSet, Rect, size_words
from patchproof.masking import Evaluator, Measured, as_images, fill_colour, occlude
from patchproof.runs import Record, as_judge, measure_on_generated
from patchproof.types import InputError, Preprocessing, Size

UPLOAD_LIMIT = 20 * 1024**2
"""Largest file that is read, in bytes."""

ATTACK_SECONDS = 60.0
"""Most seconds that optimising a patch may take, because all visitors share one classifier."""

NOISE, PICTURE, UNDEFENDED, DEFENDED = PATCH_KINDS = (
    "noise",
    "a picture",
    "optimised against the classifier",
    "optimised against the defence",
)

RECORD_KINDS: dict[str, Callable[[Record], bool]] = {
    "all": lambda record: True,
    "certified": lambda record: bool(record.certified),
    "not certified": lambda record: not record.certified,
    "answered wrong": lambda record: not record.defended,
}


class Placed(NamedTuple):
    """A patch (3 p q) in 8 bits and its location."""

    patch: Tensor
    rect: Rect


@dataclass(frozen=True, eq=False)
class Selection:
    """The view of one visitor: an image and its finding, a cell of its table, and one or two patches, of which the one
    number `chosen` can be moved and changed."""

    pixels: UInt8[Tensor, "3 h w"]
    finding: Finding
    words: str
    index: int | None
    cell: Cell
    patches: tuple[Placed, ...]
    chosen: int = 0

    @property
    def one(self) -> Placed:
        """The chosen patch."""
        return self.patches[self.chosen]

    @property
    def patched(self) -> UInt8[Tensor, "3 h w"]:
        patched = self.pixels.clone()
        for patch, rect in self.patches:
            patched[:, rect.top : rect.bottom, rect.left : rect.right] = patch
        return patched

    def moved(self, top: float, left: float, patch: UInt8[Tensor, "3 p q"] | None = None) -> Selection:
        """Move the chosen patch, with the pixels of `patch` if given, to the nearest location inside the image."""
        patch = self.one.patch if patch is None else patch
        (rows, columns), (height, width) = self.pixels.shape[1:], patch.shape[1:]
        rect = Rect(max(0, min(int(top), rows - height)), max(0, min(int(left), columns - width)), height, width)
        patches = list(self.patches)
        patches[self.chosen] = Placed(patch, rect)
        return replace(self, patches=tuple(patches))


@dataclass
class Explorer:
    """A defence, its preprocessing, the names of its labels, and images to pick from with their records.

    The passes are in float32, with the τ of the defence's engine or one measured on generated images. An image on which
    the rounding exceeds τ is answered all the same, because anybody may drop one in.
    """

    defense: Any
    preprocessing: Preprocessing
    about: str
    names: Mapping[int, str]
    source: ImageSource | None = None
    records: tuple[Record, ...] = ()
    notices: tuple[str, ...] = ()
    evaluator: Evaluator | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        engine = getattr(self.defense, "engine", None)
        if not isinstance(engine, Measured):
            engine, _ = measure_on_generated(self.defense) or (None, None)
        if engine is None:
            return
        engine = Measured(tau=0.0, tau_fp32=engine.tau_fp32)
        self.evaluator = Evaluator(self.defense.classifier, engine, strict=False)
        if hasattr(self.defense, "with_engine"):
            self.defense = as_judge(self.defense.with_engine(engine))

    @property
    def size(self) -> Size:
        return self.defense.threat.image_size

    @property
    def masks(self) -> MaskSet | None:
        """The masks whose copies can be shown; None for a defence without masks or without a classifier."""
        return None if self.evaluator is None else getattr(self.defense, "masks", None)

    @property
    def in_pairs(self) -> bool:
        return isinstance(self.defense, PatchCleanser)

    @property
    def title(self) -> str:
        threat, size = self.defense.threat.words, size_words(self.size)
        masks = "" if self.masks is None else f", {self.masks.words}"
        tau = "" if self.evaluator is None else f", τ = {self.evaluator.measured.tau_fp32:.2g}"
        return f"{self.about}, {self.defense.name}: {threat} anywhere on {size}{masks}{tau}"

    def name(self, label: int) -> str:
        return "an alarm" if label < 0 else self.names.get(label, f"class {label}")

    def of_kind(self, kind: str) -> tuple[Record, ...]:
        return tuple(filter(RECORD_KINDS[kind], self.records))

    def image(self, pixels: UInt8[Tensor, "3 h w"]) -> Float[Tensor, "3 h w"]:
        return as_images(pixels[None], device_of(self.defense))[0]

    def rounds(self, pixels: UInt8[Tensor, "3 h w"]) -> Rounds:
        return watch(self.defense, self.evaluator, self.image(pixels))

    def masked(self, pixels: UInt8[Tensor, "3 h w"], masks: tuple[int, ...]) -> UInt8[Tensor, "3 h w"]:
        """The image under these masks, as it is shown."""
        image, keep = as_images(pixels[None], "cpu"), self.defense.masks.keep()[list(masks)].all(dim=0)
        return to_bytes(occlude(image, keep, fill_colour(self.defense.classifier, image))[0])

    def pixels(self, record: Record) -> UInt8[Tensor, "3 h w"]:
        """The image of a record as the network sees it, in 8 bits."""
        if self.source is None:
            raise InputError("no images are on offer; drop in one of your own")
        return self._network_input(self.source.load(record.index), record.path)

    def _network_input(self, image: Image.Image | Tensor, name: str) -> UInt8[Tensor, "3 h w"]:
        pixels = preprocess(image, self.preprocessing)
        if tuple(pixels.shape[1:]) != self.size:
            raise InputError(f"{name} becomes {tuple(pixels.shape[1:])} pixels, the defence is for {self.size}")
        return to_bytes(pixels) if pixels.is_floating_point() else pixels

    def picture(self, file: Path) -> Image.Image:
        """Read a visitor's file in RGB; refuse it if it is too large, broken or not an image."""
        megabytes, most = file.stat().st_size / 1024**2, UPLOAD_LIMIT // 1024**2
        if megabytes > most:
            raise InputError(f"{file.name} has {megabytes:.1f} MB, at most {most} MB are taken; shrink it")
        try:
            return decode(file)
        except BadImageError as error:
            raise InputError(f"cannot use {file.name}: {error.reason}") from error

    def pick(self, record: Record, before: Selection | None = None) -> Selection:
        """The image of a record, with the patch that was on the image `before`."""
        return self._select(self.pixels(record), record.label, record_words(record, self.name), before, record.index)

    def own(self, file: Path, before: Selection | None = None) -> Selection:
        """A visitor's file, resized and cropped like the images of the run."""
        words = f"Your image {file.name}. Its label is not known, so margins are about the defended answer."
        picture = self.picture(file)
        if is_turned(picture):
            words += " Its EXIF orientation is not applied, so it may lie on its side, as the network sees it."
        return self._select(self._network_input(picture, file.name), None, words, before)

    def _select(
        self, pixels: Tensor, label: int | None, words: str, before: Selection | None, index: int | None = None
    ) -> Selection:
        finding = study(self.defense, self.evaluator, self.image(pixels), label)
        cell = (0, 0) if finding.copies is None else finding.copies.weakest
        if before is not None:
            return replace(before, pixels=pixels, finding=finding, words=words, index=index, cell=cell)
        size = height, width = self.defense.threat.patch_sizes[0]
        middle = Rect((self.size[0] - height) // 2, (self.size[1] - width) // 2, height, width)
        patches = Placed(noise(size, 0), middle), Placed(noise(size, 1), Rect(0, 0, height, width))
        return Selection(pixels, finding, words, index, cell, patches[: self.defense.threat.patches])

    def with_patch(
        self, shown: Selection, kind: str, *, size: int = 0, seed: int = 0, steps: int = 40, file: Path | None = None
    ) -> Selection:
        """Make the chosen patch anew, in the threat's size number `size` and as near to its place as it fits."""
        sides = self.defense.threat.patch_sizes[size]
        if kind == PICTURE and file is None:
            raise InputError("drop in a picture for the patch first")
        patch = noise(sides, seed)
        if file is not None and kind == PICTURE:
            shrunk = self.picture(file).resize((sides[1], sides[0]), Image.Resampling.BICUBIC)
            patch = torch.from_numpy(np.asarray(shrunk).copy()).permute(2, 0, 1)
        placed = shown.moved(shown.one.rect.top, shown.one.rect.left, patch)
        if kind not in (UNDEFENDED, DEFENDED):
            return placed
        image = self.optimised(placed, defended=kind == DEFENDED, steps=steps, seed=seed)
        rects = [rect for _, rect in placed.patches]
        return replace(placed, patches=tuple(Placed(image[:, r.top : r.bottom, r.left : r.right], r) for r in rects))

    def optimised(self, shown: Selection, *, defended: bool, steps: int, seed: int) -> UInt8[Tensor, "3 h w"]:
        """The image with its patches optimised to lead the classifier, or the defence, away from the label."""
        evaluator, images = self.evaluator, self.image(shown.pixels)[None]
        rects = tuple(one.rect for one in shown.patches)
        place = rects if len(rects) > 1 else rects[0]
        if evaluator is None:
            raise InputError("an optimised patch needs the gradients of a classifier, and this defence has none")
        ways = self.defense.objectives() if defended and hasattr(self.defense, "objectives") else ()
        objective = next(iter(ways), Misclassify("margin"))
        target, threat = self.defense if defended else Undefended(evaluator), self.defense.threat
        if defended and hasattr(self.defense, "surrogate"):
            evaluator = Evaluator(self.defense.surrogate, evaluator.engine)
        labels = torch.tensor([shown.finding.label], device=images.device)

        def attacked(steps: int) -> Tensor:
            plan = AttackPlan(steps=steps, restarts=2)
            attack = GradientAttack(evaluator, target, threat, objective, plan=plan, place=place)
            return attack(images, labels, generators=[image_generator(seed, 0)]).images[0]

        began = time.monotonic()
        attacked(1)
        affordable = int(ATTACK_SECONDS / (time.monotonic() - began))
        return to_bytes(attacked(max(1, min(steps, affordable))))


def noise(size: Size, seed: int) -> UInt8[Tensor, "3 p q"]:
    """A patch in which every value is drawn uniformly."""
    return torch.randint(256, (3, *size), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def to_bytes(image: Float[Tensor, "c h w"]) -> UInt8[Tensor, "c h w"]:
    return image.mul(255).round().to(torch.uint8).cpu().contiguous()
