"""Images of runs next to what decided about them: the copy under masks, or the patch that changed the answer."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
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

Patches = Mapping[Rect, Tensor | None]
"""Rectangles of a copy, each with the patch (c p q) there; None if it is masked."""


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
        cards = list[Card]()
        for record in ordered:
            masks, answered = witness(run, record)
            hidden = {run.masks.blocks[number]: None for number in masks} if run.masks else {}
            words = f"under {count_words(len(masks), 'mask', 'masks')}"
            cards += make_card(run, source, record, hidden, words, answered)
        missing += len(ordered) - len(cards)
        groups += [(title.capitalize(), cards)] if cards else []
    return groups, f"{count_words(missing, 'chosen image', 'chosen images')} cannot be read." if missing else None


def attacked_gallery(run: StoredCertification, source: ImageSource, count: int) -> list[Cards]:
    """Images whose right answer a patch changed, behind the defence and without it; broken certificates first."""
    defended = [r for r in run.attacks if r.attack and r.attack.place is not None and (r.defended or r.broken)]
    alone = [r for r in run.attacks if r.attack and r.undefended and r.attack.undefended_attacked is False]
    defended.sort(key=lambda r: (not r.broken, r.index))
    groups = list[Cards]()
    for title, name, records in (
        ("The defence, changed by a patch", "defended", defended),
        ("The classifier alone, changed by a patch", "undefended", alone),
    ):
        cards = list[Card]()
        for record in records[:count]:
            kept, answered = kept_patches(run.folder / "patches" / f"{record.index}.safetensors", name)
            if name == "defended" and record.attack:  # the record has a checksum, the file of patches has none
                kept = {Rect(*place): kept.get(Rect(*place)) for place in record.attack.places}
                answered = record.attack.attacked_label
            words = "where the patch was" if None in kept.values() else "with the patch"
            # The margin belongs to the certificate of the clean image, not to this answer.
            found = make_card(run, source, record, kept, words, answered) if kept else []
            cards += [replace(card, margin=None) for card in found]
        groups += [(title, cards)] if cards else []
    return groups


def make_card(
    run: StoredCertification, source: ImageSource, record: Record, patches: Patches, words: str, answered: int | None
) -> list[Card]:
    """The image as the network sees it, beside its copy with these patches, if there are any.

    Nothing if the image cannot be read, is not the one of the record, or does not hold the patches.
    """
    if record.index >= len(source) or source.path(record.index) != record.path:
        return []
    try:
        pixels = preprocess(source.load(record.index), run.preprocessing or Preprocessing(resize=None))
    except (PatchproofError, OSError):
        return []
    image = as_images(pixels[None], "cpu")[0]
    size = (image.shape[1], image.shape[2])
    inside = all(rect.height and rect.width and Rect(0, 0, *size).contains(rect) for rect in patches)
    if size != (run.image_size or size) or len(image) not in (1, 3) or not inside:
        return []
    margin = "–" if record.margin is None else f"{record.margin:+.3g}"
    title, label = printable(record.path), run.class_name(record.label)
    card = Card(title, label, margin, bool(record.certified), data_uri(image), size)
    if not patches:
        return [card]
    fill = run.fill if run.fill is not None and len(run.fill) == len(image) else (0.5,) * len(image)
    copy = occlude(image, MaskSet(size, tuple(patches)).keep().all(dim=0), torch.tensor(fill)[:, None, None])
    for rect, patch in patches.items():
        if patch is not None:
            copy[:, rect.top : rect.bottom, rect.left : rect.right] = patch
    answer = None if answered is None else run.class_name(answered)
    return [replace(card, masked=data_uri(copy), rects=tuple(patches), how=words, answered=answer)]


def kept_patches(path: Path, name: str) -> tuple[dict[Rect, Tensor | None], int | None]:
    """The patches (c p q) that an attack left, by their place, and the answer to them; empty if the file is missing or
    damaged."""
    try:
        found, kept = load_file(path), dict[Rect, Tensor | None]()
        for one in (name, f"{name}_2"):
            if one in found:
                rect = Rect(*map(int, found[f"{one}_place"].tolist()))
                fits = found[one].shape[1:] == (rect.height, rect.width)
                kept[rect] = found[one].float().clamp(0, 1) if fits else None
        return kept, int(found[f"{name}_label"])
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
