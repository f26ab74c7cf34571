"""Images of runs: beside what the network saw of them, and under the masks that each strategy trains on."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64, UInt8
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
from patchproof.report._content import outcomes, witness
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
    masked: str | None = None
    rects: tuple[Rect, ...] = ()
    how: str = ""
    answered: str | None = None
    patched: bool = False
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
        ordered, cards = sorted(records, key=lambda record: (abs(record.margin or 0.0), record.index)), []
        if len(ordered) > count:
            ordered = [ordered[i * (len(ordered) - 1) // max(1, count - 1)] for i in range(count)]
        for record in ordered:
            image = _image(run, source, record)
            if image is None:
                missing += 1
                continue
            card, (masks, answer) = _card(run, record, image), witness(run, record)
            if masks and run.masks is not None:
                rects, how = [run.masks.blocks[i] for i in masks], count_words(len(masks), "mask", "masks")
                card = _beside(card, run, hidden(image, rects, run.fill), rects, f"under {how}", answer)
            cards.append(card)
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
        cards = [card for record in records[:count] if (card := _patched_card(run, source, record, name)) is not None]
        groups += [(title, cards)] if cards else []
    return Gallery(groups) if groups else None


def _patched_card(run: StoredCertification, source: ImageSource, record: Record, name: str) -> Card | None:
    """The image beside its copy with the patch that was kept; blank where only the place is known."""
    image = _image(run, source, record)
    if image is None or record.attack is None:
        return None
    kept, label = kept_patches(run.folder / "patches" / f"{record.index}.safetensors", name)
    if name == "defended":  # of which the record itself speaks
        kept = {place: kept.get(place) for place in record.attack.places}
        label = record.attack.attacked_label
    rects, whole = [Rect(*place) for place in kept], Rect(0, 0, *image.shape[1:])
    if not rects or not all(rect.height and rect.width and whole.contains(rect) for rect in rects):
        return None
    shown, fits = hidden(image, rects, run.fill), True
    for rect, patch in zip(rects, kept.values(), strict=True):
        fits = fits and patch is not None and patch.shape == (len(image), rect.height, rect.width)
        if patch is not None and fits:
            shown[:, rect.top : rect.bottom, rect.left : rect.right] = patch
    patches, were = ("patch", "was") if len(rects) == 1 else ("patches", "were")
    how = f"with the {patches}" if fits else f"where the {patches} {were}"
    return replace(_beside(_card(run, record, image), run, shown, rects, how, label), patched=fits)


def _card(run: StoredCertification, record: Record, image: Float[Tensor, "c h w"]) -> Card:
    return Card(
        title=printable(record.path),
        label=run.class_name(record.label),
        margin="–" if record.margin is None else f"{record.margin:+.3g}",
        certified=bool(record.certified),
        image=data_uri(image),
        size=(int(image.shape[1]), int(image.shape[2])),
    )


def _beside(
    card: Card,
    run: StoredCertification,
    copy: Float[Tensor, "c h w"],
    rects: Sequence[Rect],
    how: str,
    label: int | None,
) -> Card:
    """The card with the copy that decided, framed, and the label under it."""
    answered = None if label is None else run.class_name(label)
    return replace(card, masked=data_uri(copy), rects=tuple(rects), how=how, answered=answered)


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


def _image(run: StoredCertification, source: ImageSource, record: Record) -> Float[Tensor, "c h w"] | None:
    """The image as the network saw it; None where it cannot be read or is not the record's."""
    if record.index >= len(source) or source.path(record.index) != record.path:
        return None
    try:
        pixels = preprocess(source.load(record.index), run.preprocessing or Preprocessing(resize=None))
    except (PatchproofError, OSError):
        return None
    image = as_images(pixels[None], "cpu")[0]
    size = int(image.shape[1]), int(image.shape[2])
    return image if size == (run.image_size or size) and len(image) in (1, 3) else None


def hidden(
    image: Float[Tensor, "c h w"], rects: Sequence[Rect], fill: Sequence[float] | None
) -> Float[Tensor, "c h w"]:
    """x ⊙ m0 ⊙ m1 … with the run's fill; mid-grey where it has none."""
    keep = MaskSet((int(image.shape[1]), int(image.shape[2])), tuple(rects)).keep().all(dim=0)
    colour = fill if fill is not None and len(fill) == len(image) else (0.5,) * len(image)
    return occlude(image, keep, torch.tensor(colour)[:, None, None])


def data_uri(image: Float[Tensor, "c h w"]) -> str:
    """The image inside the page itself, in 8 bits."""
    picture, file = Image.fromarray(_bytes(image.expand(3, -1, -1))), io.BytesIO()
    kind = "png" if max(picture.size) <= SMALL else "jpeg"
    picture.thumbnail((LARGEST, LARGEST), Image.Resampling.LANCZOS)
    picture.save(file, kind, quality=86, optimize=True)
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode('ascii')}"


def _bytes(image: Float[Tensor, "c h w"]) -> UInt8[np.ndarray, "h w c"]:
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
        images, labels = sample(source, classifier)
        words = class_words(dict(enumerate(classifier.class_names or source.class_names)))
        if not strips:
            strips.append(("image", images, [shortened(words[label], 22) for label in labels.tolist()]))
        keep = chosen_masks(strategy, classifier, images, labels, seed=seed)
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
                axes.imshow(_bytes(image), interpolation="none")
                axes.set_xlabel(caption, fontsize=6.5)
                axes.set(xticks=[], yticks=[])
        title = f"What each strategy hides from its own network, n = {count} images"
        figure.suptitle(f"{title}: answer, and loss in nats", fontsize=9.5)
        return Picture("worst-masks", title, f"{title}, with the network's answer and its loss below each.", figure)


def sample(source: ImageSource, classifier: ImageClassifier) -> tuple[Float[Tensor, "b c h w"], Int64[Tensor, " b"]]:
    """A few images spread over the source, and the classifier's outputs for their labels."""
    how = preprocessing_for(classifier, source.low_resolution, classifier.input_size)
    indices = spread_indices(source, COLUMNS)
    (batch,) = iterate_batches(source, how, indices, batch_size=COLUMNS, skip_bad=True)
    outputs = torch.tensor(match_labels(source.class_names, classifier))
    return as_images(batch.images, "cpu"), outputs[batch.labels]


def chosen_masks(
    strategy: str, classifier: ImageClassifier, images: Tensor, labels: Tensor, *, seed: int
) -> Bool[Tensor, "copies b 1 h w"]:
    """What the strategy leaves visible; no copies where it takes too long to choose."""
    generator = torch.Generator().manual_seed(seed)
    chosen = masking_strategy(strategy, image_size=classifier.input_size, generator=generator)
    if chosen.forwards + chosen.backwards > MOST_PASSES:
        return torch.ones(0, len(images), 1, *classifier.input_size, dtype=torch.bool)
    return chosen(classifier, images, labels)
