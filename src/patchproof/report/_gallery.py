"""Images of runs beside what decided about them: the copy under masks, or the patch that changed the answer."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
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
from patchproof.runs._reading import count_words, printable
from patchproof.types import PatchproofError, Preprocessing, Size

SMALL = 64
"""Images up to this side are kept pixel by pixel; larger ones as JPEG, no larger than LARGEST."""

LARGEST = 224


@dataclass(frozen=True)
class Card:
    """One image as the network sees it and, if known, the masked or patched copy that decided, with its label."""

    title: str
    label: str
    margin: str
    certified: bool
    image: str
    size: Size
    masked: str | None
    rects: Sequence[Rect]
    how: str
    answered: str | None
    patched: bool
    """Whether `masked` shows the pixels of a patch."""


Cards = tuple[str, list[Card]]
"""A title and the images below it."""


def make_gallery(run: StoredCertification, source: ImageSource, count: int) -> tuple[list[Cards], str | None]:
    """`count` certified images and `count` others, evenly spaced in the order of their margins, each beside its copy
    under the masks that decided where these are known; and whether some cannot be read."""
    groups, missing = [], 0
    for title, records in outcomes(run).items():
        ordered = sorted(records, key=lambda record: (abs(record.margin or 0.0), record.index))
        if len(ordered) > count:
            ordered = [ordered[i * (len(ordered) - 1) // max(1, count - 1)] for i in range(count)]
        cards = [card for record in ordered if (card := make_card(run, source, record)) is not None]
        missing += len(ordered) - len(cards)
        groups += [(title.capitalize(), cards)] if cards else []
    return groups, f"{count_words(missing, 'chosen image', 'chosen images')} cannot be read." if missing else None


def attacked_gallery(run: StoredCertification, source: ImageSource, count: int) -> list[Cards]:
    """Images whose right answer a patch changed, first by the defence, broken certificates first."""
    defended = [r for r in run.attacks if r.attack and r.attack.place is not None and (r.defended or r.broken)]
    alone = [r for r in run.attacks if r.attack and r.undefended and r.attack.undefended_attacked is False]
    defended.sort(key=lambda r: (not r.broken, r.index))
    groups = []
    for title, name, records in (
        ("The defence, changed by a patch", "defended", defended),
        ("The classifier alone, changed by a patch", "undefended", alone),
    ):
        cards = [card for record in records[:count] if (card := make_card(run, source, record, name)) is not None]
        groups += [(title, cards)] if cards else []
    return groups


def make_card(
    run: StoredCertification, source: ImageSource, record: Record, attacked: str | None = None
) -> Card | None:
    """The image beside its copy under the masks that decided; or, of what was `attacked`, with the patch that was kept,
    blank where only its place is known. None where the image cannot be read or is not the record's, or the patch does
    not lie in it."""
    if record.index >= len(source) or source.path(record.index) != record.path:
        return None
    try:
        pixels = preprocess(source.load(record.index), run.preprocessing or Preprocessing(resize=None))
    except (PatchproofError, OSError):
        return None
    image = as_images(pixels[None], "cpu")[0]
    size = int(image.shape[1]), int(image.shape[2])
    if size != (run.image_size or size) or len(image) not in (1, 3):
        return None
    patches: Sequence[Tensor | None] = ()
    if attacked is None:
        masks, label = witness(run, record)
        rects = [run.masks.blocks[i] for i in masks] if run.masks else []
        how, patched = f"under {count_words(len(masks), 'mask', 'masks')}", False
    else:
        kept, label = kept_patches(run.folder / "patches" / f"{record.index}.safetensors", attacked)
        if attacked == "defended" and record.attack:  # of which the record itself speaks
            kept = {place: kept.get(place) for place in record.attack.places}
            label = record.attack.attacked_label
        rects, patches = [Rect(*place) for place in kept], list(kept.values())
        if not rects or not all(r.height and r.width and Rect(0, 0, *size).contains(r) for r in rects):
            return None
        one, were = ("patch", "was") if len(rects) == 1 else ("patches", "were")
        patched = all(p is not None and p.shape[1:] == (r.height, r.width) for r, p in zip(rects, patches, strict=True))
        how = f"with the {one}" if patched else f"where the {one} {were}"
    copy = image
    if rects:  # x ⊙ m0 ⊙ m1 … with the run's fill; mid-grey where it has none
        keep = MaskSet(size, tuple(rects)).keep().all(dim=0)
        fill = run.fill if run.fill is not None and len(run.fill) == len(image) else (0.5,) * len(image)
        copy = occlude(image, keep, torch.tensor(fill)[:, None, None])
    for rect, patch in zip(rects, patches, strict=False):
        if patch is not None and patched:
            copy[:, rect.top : rect.bottom, rect.left : rect.right] = patch
    return Card(
        title=printable(record.path),
        label=run.class_name(record.label),
        margin="–" if record.margin is None else f"{record.margin:+.3g}",
        certified=bool(record.certified),
        image=data_uri(image),
        size=size,
        masked=data_uri(copy) if rects else None,
        rects=rects,
        how=how,
        answered=run.class_name(label) if rects and label is not None else None,
        patched=patched,
    )


def kept_patches(path: Path, name: str) -> tuple[dict[tuple[int, ...], Tensor | None], int | None]:
    """Patches (c p q) by their place and the answer to them, as the attack left them; none where they are missing or
    damaged."""
    try:
        found, patches = load_file(path), dict[tuple[int, ...], Tensor | None]()
        for one in (name, f"{name}_2"):
            if one in found or one == name:
                patch, (top, left, height, width) = found[one], map(int, found[f"{one}_place"])
                if not (patch.is_floating_point() and bool(((patch >= 0) & (patch <= 1)).all())):
                    return {}, None
                patches[top, left, height, width] = patch.float()
        return patches, int(found[f"{name}_label"])
    except (SafetensorError, OSError, KeyError, ValueError, TypeError, RuntimeError):
        return {}, None


def data_uri(image: Float[Tensor, "c h w"]) -> str:
    """The image inside the page itself, in 8 bits."""
    picture, file = Image.fromarray(to_bytes(image.expand(3, -1, -1))), io.BytesIO()
    kind = "png" if max(picture.size) <= SMALL else "jpeg"
    picture.thumbnail((LARGEST, LARGEST), Image.Resampling.LANCZOS)
    picture.save(file, kind, quality=86, optimize=True)
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode('ascii')}"


def to_bytes(image: Float[Tensor, "c h w"]) -> UInt8[np.ndarray, "h w c"]:
    return image.mul(255).round().to(torch.uint8).permute(1, 2, 0).contiguous().numpy()
