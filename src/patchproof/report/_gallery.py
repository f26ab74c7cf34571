"""Images of a run, beside what the network saw of them where the records say so: the copy under the deciding masks."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from patchproof.data import BadImageError, ImageSource, preprocess
from patchproof.geometry import MaskSet, Rect
from patchproof.masking import as_images, occlude
from patchproof.runs._reading import StoredCertification, count_words, printable
from patchproof.runs._record import Record
from patchproof.types import PatchproofError, Preprocessing, Size

SMALL = 64
"""Images up to this side are kept pixel by pixel; larger ones as JPEG, no larger than LARGEST."""

LARGEST = 224


@dataclass(frozen=True)
class Card:
    """One image as the network sees it; beside it, where something was hidden from it, that copy and its answer."""

    title: str
    label: str
    margin: str
    certified: bool
    image: str
    size: Size
    masked: str | None = None
    rects: tuple[Rect, ...] = ()
    how: str = ""
    answered: str | None = None

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
    """Titles and their cards; a notice where images are missing."""

    groups: tuple[tuple[str, tuple[Card, ...]], ...] = ()
    notice: str | None = None


def make_gallery(run: StoredCertification, source: ImageSource, count: int) -> Gallery:
    """`count` certified images and `count` others, evenly spaced in the order of their margins."""
    groups, chosen = [], 0
    for title, certified in (("Certified", True), ("Not certified", False)):
        kind = [record for record in run.good if bool(record.certified) == certified]
        ordered = sorted(kind, key=lambda record: (abs(record.margin or 0.0), record.index))
        if len(ordered) > count:
            ordered = [ordered[i * (len(ordered) - 1) // max(1, count - 1)] for i in range(count)]
        chosen += len(ordered)
        cards = [_card(run, source, record) for record in ordered]
        groups.append((title, tuple(card for card in cards if card is not None)))
    missing = chosen - sum(len(cards) for _, cards in groups)
    notice = f"{count_words(missing, 'chosen image', 'chosen images')} cannot be read." if missing else None
    return Gallery(tuple(group for group in groups if group[1]), notice)


def attacked_gallery(run: StoredCertification, source: ImageSource, records: Iterable[Record]) -> Gallery | None:
    """Images whose answer a patch changed, with its place; None where none can be shown."""
    cards = [card for record in records if (card := _card(run, source, record, changed=True)) is not None]
    return Gallery((("Changed by a patch", tuple(cards)),)) if cards else None


def _card(run: StoredCertification, source: ImageSource, record: Record, *, changed: bool = False) -> Card | None:
    """None where the image cannot be read or is not the record's, or the place of its patch is not inside it."""
    if record.index >= len(source) or source.path(record.index) != record.path:
        return None
    try:
        pixels = preprocess(source.load(record.index), run.preprocessing or Preprocessing(resize=None))
    except (BadImageError, PatchproofError, OSError):
        return None
    image = as_images(pixels[None], "cpu")[0]
    size = int(image.shape[1]), int(image.shape[2])
    if size != (run.image_size or size) or len(image) not in (1, 3):
        return None
    rects, answer, how = witness(run, record)
    if changed:
        assert record.attack is not None
        assert record.attack.place is not None
        rects, answer, how = (Rect(*record.attack.place),), record.attack.attacked_label, "where the patch was"
        if not (rects[0].height and rects[0].width and Rect(0, 0, *size).contains(rects[0])):
            return None
    return Card(
        title=printable(record.path),
        label=run.class_name(record.label),
        margin="–" if record.margin is None else f"{record.margin:+.3g}",
        certified=bool(record.certified),
        image=data_uri(image),
        size=size,
        masked=data_uri(hidden(image, rects, run.fill)) if rects else None,
        rects=rects,
        how=how,
        answered=run.class_name(answer) if rects and answer is not None else None,
    )


def witness(run: StoredCertification, record: Record) -> tuple[tuple[Rect, ...], int | None, str]:
    """The masks of the record's witness, each once, the label it answered, and what was done in words."""
    found = record.evidence.get("witness")
    masks, label = (found.get("masks"), found.get("label")) if isinstance(found, Mapping) else (None, None)
    if run.masks is None or not isinstance(masks, list):
        return (), None, ""
    if not all(type(number) is int and 0 <= number < len(run.masks) for number in masks):
        return (), None, ""
    rects = tuple(run.masks.rects[number] for number in dict.fromkeys(masks))
    return rects, label if type(label) is int else None, f"under {count_words(len(rects), 'mask', 'masks')}"


def hidden(
    image: Float[Tensor, "c h w"], rects: Sequence[Rect], fill: Sequence[float] | None
) -> Float[Tensor, "c h w"]:
    """x ⊙ m0 ⊙ m1 … with the run's fill; mid-grey where it has none."""
    keep = MaskSet((int(image.shape[1]), int(image.shape[2])), tuple(rects)).keep().all(dim=0)
    colour = fill if fill is not None and len(fill) == len(image) else (0.5,) * len(image)
    return occlude(image, keep, torch.tensor(colour)[:, None, None])


def data_uri(image: Float[Tensor, "c h w"]) -> str:
    """The image inside the page itself, in 8 bits."""
    pixels = image.mul(255).round().to(torch.uint8).expand(3, -1, -1).permute(1, 2, 0).contiguous()
    picture, file = Image.fromarray(pixels.numpy()), io.BytesIO()
    if max(picture.size) <= SMALL:
        picture.save(file, "PNG", optimize=True)
        kind = "png"
    else:
        picture.thumbnail((LARGEST, LARGEST), Image.Resampling.LANCZOS)
        picture.save(file, "JPEG", quality=86, optimize=True)
        kind = "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode('ascii')}"
