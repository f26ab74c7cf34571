"""Images of runs next to what decided about them: the copy under masks, or the patch that changed the answer."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from patchproof.data import ImageSource, preprocess
from patchproof.geometry import MaskSet, Rect
from patchproof.masking import as_images, occlude
from patchproof.report._counts import outcomes, witness
from patchproof.runs import Record, StoredCertification
from patchproof.types import PatchproofError, Preprocessing, Size, count_words, printable

SMALL = 64
"""Longest side of images that are kept pixel by pixel; larger ones become JPEG."""

LARGEST = 224
"""Longest side of an image on the page."""


@dataclass(frozen=True)
class Card:
    """An image as the network sees it and, if known, the masked or patched copy that decided, with its label."""

    title: str
    label: str
    margin: str | None
    certified: bool
    image: str
    size: Size
    masked: str | None = None
    rects: Sequence[Rect] = ()
    how: str = ""
    answered: str | None = None


Cards = tuple[str, list[Card]]
"""A title and the images below it."""


def make_gallery(run: StoredCertification, source: ImageSource, count: int) -> tuple[list[Cards], str | None]:
    """`count` certified images and `count` others, evenly spaced in the order of their margins, and a notice if some
    of them cannot be read."""
    groups, missing = list[Cards](), 0
    for title, records in outcomes(run).items():
        ordered = sorted(records, key=lambda record: (abs(record.margin or 0.0), record.index))
        if len(ordered) > count:
            ordered = [ordered[i * (len(ordered) - 1) // max(1, count - 1)] for i in range(count)]
        cards = [card for record in ordered if (card := witness_card(run, source, record)) is not None]
        missing += len(ordered) - len(cards)
        if cards:
            groups.append((title.capitalize(), cards))
    return groups, f"{count_words(missing, 'chosen image', 'chosen images')} cannot be read." if missing else None


def attacked_gallery(run: StoredCertification, source: ImageSource, count: int) -> list[Cards]:
    """Images whose right answer a patch changed, behind the defence and without it; broken certificates first."""
    defended = [r for r in run.attacks if r.attack and r.attack.place is not None and (r.defended or r.broken)]
    alone = [r for r in run.attacks if r.attack and r.undefended and r.attack.undefended_attacked is False]
    defended.sort(key=lambda r: (not r.broken, r.index))
    groups = []
    for title, name, records in (
        ("The defence, changed by a patch", "defended", defended),
        ("The classifier alone, changed by a patch", "undefended", alone),
    ):
        cards = [card for record in records[:count] if (card := attacked_card(run, source, record, name)) is not None]
        if cards:
            groups.append((title, cards))
    return groups


def witness_card(run: StoredCertification, source: ImageSource, record: Record) -> Card | None:
    """The image next to its copy under the masks that decided, or alone if these are not known."""
    found, (masks, label) = network_input(run, source, record), witness(run, record)
    if found is None:
        return None
    image, card = found
    if run.masks is None or not masks:
        return card
    rects = [run.masks.blocks[number] for number in masks]
    answered = None if label is None else run.class_name(label)
    how = f"under {count_words(len(masks), 'mask', 'masks')}"
    return replace(card, masked=data_uri(hidden(run, image, rects)), rects=rects, how=how, answered=answered)


def attacked_card(run: StoredCertification, source: ImageSource, record: Record, name: str) -> Card | None:
    """The image next to itself with the patch that was kept, blank if only its place is known; None if the image
    cannot be read or the patch does not lie in it."""
    found = network_input(run, source, record)
    kept, label = kept_patches(run.folder / "patches" / f"{record.index}.safetensors", name)
    if name == "defended" and record.attack:  # the record has a checksum, the file of patches has none
        kept = {place: kept.get(place) for place in record.attack.places}
        label = record.attack.attacked_label
    if found is None or not kept:
        return None
    (image, card), rects = found, [Rect(*place) for place in kept]
    if not all(rect.height and rect.width and Rect(0, 0, *card.size).contains(rect) for rect in rects):
        return None
    copy, several = hidden(run, image, rects), len(rects) > 1
    how = "with the patches" if several else "with the patch"
    for rect, patch in zip(rects, kept.values(), strict=True):
        if patch is not None and patch.shape[1:] == (rect.height, rect.width):
            copy[:, rect.top : rect.bottom, rect.left : rect.right] = patch
        else:
            how = "where the patches were" if several else "where the patch was"
    answered = None if label is None else run.class_name(label)
    # The margin belongs to the certificate of the clean image, not to this answer.
    return replace(card, margin=None, masked=data_uri(copy), rects=rects, how=how, answered=answered)


def network_input(
    run: StoredCertification, source: ImageSource, record: Record
) -> tuple[Float[Tensor, "c h w"], Card] | None:
    """The image as the network sees it, and a card that shows it alone; None if it cannot be read or is not the one of
    the record."""
    if record.index >= len(source) or source.path(record.index) != record.path:
        return None
    try:
        pixels = preprocess(source.load(record.index), run.preprocessing or Preprocessing(resize=None))
    except (PatchproofError, OSError):
        return None
    image = as_images(pixels[None], "cpu")[0]
    size = (image.shape[1], image.shape[2])
    if size != (run.image_size or size) or len(image) not in (1, 3):
        return None
    margin = "–" if record.margin is None else f"{record.margin:+.3g}"
    label, certified = run.class_name(record.label), bool(record.certified)
    return image, Card(printable(record.path), label, margin, certified, data_uri(image), size)


def hidden(run: StoredCertification, image: Float[Tensor, "c h w"], rects: Sequence[Rect]) -> Float[Tensor, "c h w"]:
    """A copy of the image with these rectangles in the run's fill, or in grey if the run has none."""
    keep = MaskSet((image.shape[1], image.shape[2]), tuple(rects)).keep().all(dim=0)
    fill = run.fill if run.fill is not None and len(run.fill) == len(image) else (0.5,) * len(image)
    return occlude(image, keep, torch.tensor(fill)[:, None, None])


def kept_patches(path: Path, name: str) -> tuple[dict[tuple[int, ...], Tensor | None], int | None]:
    """The patches (c p q) that an attack left, by their place, and the answer to them; empty if the file is missing or
    damaged."""
    try:
        found = load_file(path)
        names = [one for one in (name, f"{name}_2") if one in found]
        places = [Rect(*map(int, found[f"{one}_place"].tolist())) for one in names]
        patches = [found[one].float().clamp(0, 1) for one in names]
        return dict(zip(places, patches, strict=True)), int(found[f"{name}_label"])
    except (SafetensorError, OSError, KeyError, ValueError, TypeError, RuntimeError):
        return {}, None


def data_uri(image: Float[Tensor, "c h w"]) -> str:
    """The image in 8 bits, as an address that holds all of it."""
    picture, file = Image.fromarray(to_bytes(image.expand(3, -1, -1))), io.BytesIO()
    kind = "png" if max(picture.size) <= SMALL else "jpeg"
    picture.thumbnail((LARGEST, LARGEST), Image.Resampling.LANCZOS)
    picture.save(file, kind, quality=86, optimize=True)
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode('ascii')}"


def to_bytes(image: Float[Tensor, "c h w"]) -> UInt8[np.ndarray, "h w c"]:
    return image.mul(255).round().to(torch.uint8).permute(1, 2, 0).contiguous().numpy()
