"""Images of runs: beside what the network saw of them, and under the masks that each strategy trains on."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, UInt8
from matplotlib.figure import Figure
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from patchproof.data import ImageSource, iterate_batches, preprocess, spread_indices
from patchproof.geometry import MaskSet, Rect
from patchproof.masking import as_images, network, occlude
from patchproof.models import ImageClassifier, match_labels
from patchproof.report._counts import outcomes, witness
from patchproof.report._figures import Picture, styled
from patchproof.runs import Record, StoredCertification, preprocessing_for
from patchproof.runs._reading import class_words, count_words, printable, shortened, shortened_name
from patchproof.training import masking_strategy
from patchproof.types import InputError, PatchproofError, Preprocessing, Size

SMALL = 64
"""Images up to this side are kept pixel by pixel; larger ones as JPEG, no larger than LARGEST."""

LARGEST = 224

COLUMNS = 6
SHADE = (0.84, 0.37, 0.0)
"""Vermilion; it reads as dark grey in black and white."""

STRIP_SIDE = 112
MOST_PASSES = 100
"""A strategy that takes more passes per image is left out: a page should not take minutes."""


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

    @property
    def pixelated(self) -> bool:
        return max(self.size) <= SMALL


@dataclass(frozen=True)
class Gallery:
    """Titles and their cards; a notice where images are missing."""

    groups: Sequence[tuple[str, Sequence[Card]]] = ()
    notice: str | None = None


def make_gallery(run: StoredCertification, source: ImageSource, count: int) -> Gallery:
    """`count` certified images and `count` others, evenly spaced in the order of their margins, each beside its copy
    under the masks that decided where these are known."""
    groups, missing = [], 0
    for title, records in outcomes(run).items():
        ordered = sorted(records, key=lambda record: (abs(record.margin or 0.0), record.index))
        if len(ordered) > count:
            ordered = [ordered[i * (len(ordered) - 1) // max(1, count - 1)] for i in range(count)]
        cards = [card for record in ordered if (card := make_card(run, source, record)) is not None]
        missing += len(ordered) - len(cards)
        groups += [(title.capitalize(), cards)] if cards else []
    notice = f"{count_words(missing, 'chosen image', 'chosen images')} cannot be read." if missing else None
    return Gallery(groups, notice)


def attacked_gallery(run: StoredCertification, source: ImageSource, count: int) -> Gallery | None:
    """Images whose right answer a patch changed, broken certificates first: the defence's, then the classifier's own;
    None where none can be shown."""
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
    return Gallery(groups) if groups else None


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
    copy = hidden(image, rects, run.fill) if rects else image
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


def hidden(
    image: Float[Tensor, "c h w"], rects: Sequence[Rect], fill: Sequence[float] | None
) -> Float[Tensor, "c h w"]:
    """x ⊙ m0 ⊙ m1 … with the run's fill; mid-grey where it has none."""
    keep = MaskSet((int(image.shape[1]), int(image.shape[2])), tuple(rects)).keep().all(dim=0)
    colour = fill if fill is not None and len(fill) == len(image) else (0.5,) * len(image)
    return occlude(image, keep, torch.tensor(colour)[:, None, None])


def data_uri(image: Float[Tensor, "c h w"]) -> str:
    """The image inside the page itself, in 8 bits."""
    picture, file = Image.fromarray(to_bytes(image.expand(3, -1, -1))), io.BytesIO()
    kind = "png" if max(picture.size) <= SMALL else "jpeg"
    picture.thumbnail((LARGEST, LARGEST), Image.Resampling.LANCZOS)
    picture.save(file, kind, quality=86, optimize=True)
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode('ascii')}"


def to_bytes(image: Float[Tensor, "c h w"]) -> UInt8[np.ndarray, "h w c"]:
    return image.mul(255).round().to(torch.uint8).permute(1, 2, 0).contiguous().numpy()


def worst_masks(classifiers: Mapping[str, tuple[str, ImageClassifier]], source: ImageSource, *, seed: int) -> Picture:
    """The paper's illustration: a row for each copy that each strategy trains on, masked by the classifier it trained,
    with answer and loss below.

    `classifiers` are name -> (strategy, classifier); those of another input size than the first are left out.
    """
    size = next(iter(classifiers.values()))[1].input_size
    strips: list[tuple[str, Float[Tensor, "b c h w"], list[str]]] = []  # title, images, a caption below each
    for name, (strategy, classifier) in classifiers.items():
        if classifier.input_size != size or len(classifier.fill) != 3:
            continue
        how, indices = preprocessing_for(classifier, source.low_resolution, size), spread_indices(source, COLUMNS)
        (batch,) = iterate_batches(source, how, indices, batch_size=COLUMNS, skip_bad=True)
        images = as_images(batch.images, "cpu")
        labels = torch.tensor(match_labels(source.class_names, classifier, source.name))[batch.labels]
        words = class_words(dict(enumerate(classifier.class_names or source.class_names)))
        if not strips:
            strips.append(("image", images, [shortened(words[label], 22) for label in labels.tolist()]))
        choose = masking_strategy(strategy, image_size=size, generator=torch.Generator().manual_seed(seed))
        keep = choose(classifier, images, labels) if choose.forwards + choose.backwards <= MOST_PASSES else ()
        for number, visible in enumerate(keep, start=1):
            logits = network(classifier)(images, visible)
            losses = functional.cross_entropy(logits, labels, reduction="none").tolist()
            answers = [shortened(words[label], 22) for label in logits.argmax(dim=1).tolist()]
            captions = [f"{answer}\n{loss:.2f}" for answer, loss in zip(answers, losses, strict=True)]
            shaded = torch.where(visible, images, torch.tensor(SHADE)[:, None, None])
            strips.append((f"{name} {number}" if len(keep) > 1 else name, shaded, captions))
    if not strips:
        raise InputError("none of the classifiers takes colour images, so what they were trained on cannot be shown")
    count = len(strips[0][2])
    with styled():
        figure = Figure(figsize=(1.25 * count + 0.3, 1.5 * len(strips) + 0.3), layout="constrained")
        grid = figure.subplots(len(strips), count, squeeze=False)
        for row, (name, images, captions) in zip(grid, strips, strict=True):
            row[0].set_ylabel(shortened_name(printable(name), 24), fontsize=8)
            if max(images.shape[2:]) > STRIP_SIDE:
                images = functional.interpolate(images, size=(STRIP_SIDE,) * 2, mode="bilinear", antialias=True)
            for axes, image, caption in zip(row, images, captions, strict=True):
                axes.imshow(to_bytes(image), interpolation="none")
                axes.set_xlabel(caption, fontsize=6.5)
                axes.set(xticks=[], yticks=[])
        title = f"What each strategy hides from its own network, n = {count} images"
        figure.suptitle(f"{title}: answer, and loss in nats", fontsize=9.5)
        return Picture("worst-masks", title, f"{title}, with the network's answer and its loss below each.", figure)
