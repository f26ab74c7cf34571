"""Images of a run beside what the network saw of them: the copy under the two masks that decided."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import UInt8
from PIL import Image
from torch import Tensor

from patchproof.data import BadImageError, ImageSource, open_dataset, preprocess
from patchproof.geometry import MaskSet, Rect
from patchproof.masking import as_images, occlude
from patchproof.records import AttackRecord, Record
from patchproof.report._facts import Facts
from patchproof.report._runs import CertifyRun
from patchproof.report._text import printable
from patchproof.types import PatchproofError, Preprocessing, Size

SMALL = 64
"""Images up to this side are kept pixel by pixel; larger ones as JPEG, no larger than LARGEST."""

LARGEST = 224
ELSEWHERE = "name where they lie now with --dataset or --data-dir"


@dataclass(frozen=True)
class Card:
    """One image: as the network would see it, and under its witness; what was true, answered, and by how much."""

    title: str
    label: str
    answered: str
    margin: str
    image: str
    masked: str
    rects: tuple[Rect, ...]
    size: Size
    certified: bool
    how: str = "under two masks"
    """What was done to the right one."""

    @property
    def right(self) -> bool:
        return self.certified and self.answered == self.label

    @property
    def too_close(self) -> bool:
        """The right label, but not far enough ahead to count."""
        return not self.certified and self.answered == self.label

    @property
    def pixelated(self) -> bool:
        return max(self.size) <= SMALL


@dataclass(frozen=True)
class Gallery:
    """Certified images and failures, each from the narrowest to the widest margin; or why there are none."""

    certified: tuple[Card, ...] = ()
    failures: tuple[Card, ...] = ()
    changed: tuple[Card, ...] = ()
    notice: str | None = None

    @property
    def groups(self) -> list[tuple[str, tuple[Card, ...]]]:
        named = ("Certified", self.certified), ("Not certified", self.failures), ("Changed by a patch", self.changed)
        return [(title, cards) for title, cards in named if cards]


@dataclass(frozen=True)
class Images:
    """The images of a run, read as the run read them."""

    source: ImageSource
    preprocessing: Preprocessing
    masks: MaskSet
    fill: tuple[float, ...]


def make_gallery(run: CertifyRun, count: int, *, dataset: str | None, data_dir: Path | None) -> Gallery:
    """`count` certified images and `count` failures, evenly spaced in the order of their margins."""
    if not run.good:
        return Gallery(notice="There is no record of an image that could be shown.")
    found = open_images(run.facts, dataset=dataset, data_dir=data_dir)
    if isinstance(found, str):
        return Gallery(notice=found)
    certified, failures = (_chosen(run.good, count, certified=kind) for kind in (True, False))
    gallery = Gallery(tuple(_cards(run, found, certified)), tuple(_cards(run, found, failures)))
    missing = len(certified) + len(failures) - len(gallery.certified) - len(gallery.failures)
    return (
        replace(gallery, notice=f"{missing} chosen images cannot be read or have no witness.") if missing else gallery
    )


def attacked_gallery(
    run: CertifyRun, records: Sequence[AttackRecord], count: int, *, dataset: str | None, data_dir: Path | None
) -> Gallery | None:
    """Up to `count` images whose answer a patch changed, with its place; None where there are none to show."""
    found = open_images(run.facts, dataset=dataset, data_dir=data_dir) if records and count else ""
    if isinstance(found, str):
        return None
    return Gallery(changed=tuple(_changed_cards(run, found, records[:count])))


def _changed_cards(run: CertifyRun, images: Images, records: Sequence[AttackRecord]) -> Iterator[Card]:
    for record in records:
        pixels = _pixels(images, record)
        if pixels is None or record.place is None or record.attacked_label is None:
            continue
        rect = Rect(*record.place)
        if not (rect.height and rect.width and Rect(0, 0, *images.masks.image_size).contains(rect)):
            continue
        yield Card(
            title=printable(record.path),
            label=run.class_name(record.label),
            answered=run.class_name(record.attacked_label),
            margin="–" if record.margin is None else f"{record.margin:+.3g}",
            image=data_uri(pixels),
            masked=data_uri(masked_pixels(pixels, (rect,), images.fill)),
            rects=(rect,),
            size=(int(pixels.shape[1]), int(pixels.shape[2])),
            certified=bool(record.certified),
            how="where the patch lay",
        )


def open_images(facts: Facts, *, dataset: str | None, data_dir: Path | None) -> Images | str:
    """The run's images if they are still there and the same, else the reason in words."""
    name = dataset or _text(facts.config.get("dataset"))
    if facts.masks is None or facts.preprocessing is None or not facts.fill or name is None:
        return "The manifest does not say how the images were read and masked, so none are shown."
    own = _text(facts.config.get("data_dir"))
    place = data_dir or (Path(own) if own else None)
    reason = ""
    for split in dict.fromkeys((_text(facts.config.get("split")), None)):  # a folder named now may have no splits
        found = _same_images(facts, name, place, split)
        if not isinstance(found, str):
            return Images(found, facts.preprocessing, facts.masks, facts.fill)
        reason = reason or found
    return f"{reason}; {ELSEWHERE}."


def _same_images(facts: Facts, name: str, place: Path | None, split: str | None) -> ImageSource | str:
    try:
        source = open_dataset(name, data_dir=place, split=split)
        digest = source.listing_sha256()
    except (PatchproofError, OSError) as error:
        return f"The images are not there any more ({printable(str(error))})"
    if digest == facts.data_sha256:
        return source
    return f"The images in {printable(name)} are not those of the run (another sha256 of the listing): none are shown"


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _chosen(records: Sequence[Record], count: int, *, certified: bool) -> list[Record]:
    """Evenly spaced by margin, so that close calls and clear ones are both there."""
    kind = [r for r in records if bool(r.certified) == certified and r.margin is not None]
    ordered = sorted(kind, key=lambda record: (abs(record.margin or 0.0), record.index))
    if len(ordered) <= count:
        return ordered
    return [ordered[i * (len(ordered) - 1) // max(1, count - 1)] for i in range(count)]


def _cards(run: CertifyRun, images: Images, records: Sequence[Record]) -> Iterator[Card]:
    for record in records:
        pixels = _pixels(images, record)
        rects = _witness_rects(images.masks, record)
        if pixels is not None and rects and record.witness is not None:
            yield Card(
                title=printable(record.path),
                label=run.class_name(record.label),
                answered=run.class_name(record.witness.label),
                margin=f"{record.margin:+.3g}",
                image=data_uri(pixels),
                masked=data_uri(masked_pixels(pixels, rects, images.fill)),
                rects=rects,
                size=(int(pixels.shape[1]), int(pixels.shape[2])),
                certified=bool(record.certified),
            )


def _pixels(images: Images, record: Record) -> UInt8[Tensor, "3 h w"] | None:
    """The network input in 8 bits; None where the image cannot be read or is not the record's."""
    if record.index >= len(images.source) or images.source.path(record.index) != record.path:
        return None
    try:
        pixels = preprocess(images.source.load(record.index), images.preprocessing)
    except (BadImageError, PatchproofError, OSError):
        return None
    return pixels if tuple(pixels.shape[1:]) == images.masks.image_size else None


def _witness_rects(masks: MaskSet, record: Record) -> tuple[Rect, ...]:
    """The masks of the witness, each once; none where the mask set has no such masks."""
    if record.witness is None or max(record.witness.masks) >= len(masks):
        return ()
    return tuple(masks.rects[i] for i in dict.fromkeys(record.witness.masks))


def masked_pixels(
    pixels: UInt8[Tensor, "c h w"], rects: Sequence[Rect], fill: Sequence[float]
) -> UInt8[Tensor, "c h w"]:
    """x ⊙ m0 ⊙ m1 with the run's fill, in 8 bits."""
    size = int(pixels.shape[1]), int(pixels.shape[2])
    keep = MaskSet(size, tuple(rects)).keep().all(dim=0)
    shown = occlude(as_images(pixels[None], "cpu")[0], keep, torch.tensor(fill)[:, None, None])
    return shown.mul(255).round().to(torch.uint8)


def data_uri(pixels: UInt8[Tensor, "3 h w"]) -> str:
    """The image inside the page itself."""
    image, file = Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy()), io.BytesIO()
    if max(image.size) <= SMALL:
        image.save(file, "PNG", optimize=True)
    else:
        image.thumbnail((LARGEST, LARGEST), Image.Resampling.LANCZOS)
        image.save(file, "JPEG", quality=86, optimize=True)
    kind = "png" if max(image.size) <= SMALL else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode('ascii')}"
