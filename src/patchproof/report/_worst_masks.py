"""What strategies hide from the networks they trained, on the same images: the paper's illustration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn import functional

from patchproof.data import ImageSource, default_preprocessing, iterate_batches, spread_indices
from patchproof.masking import as_images, fill_colour, forward, occlude
from patchproof.models import ImageClassifier, match_labels
from patchproof.report._figures import Picture, styled
from patchproof.report._text import class_words, printable, shortened
from patchproof.training import masking_strategy

COLUMNS = 6
SHADE = (0.84, 0.37, 0.0)
"""Vermilion; it reads as dark grey in black and white."""

LARGEST = 112
MOST_PASSES = 100
"""A strategy that takes more passes an image is left out: a page should not take minutes."""


@dataclass(frozen=True)
class Strip:
    """One row of the picture: the images, under masks or not, and a caption below each."""

    title: str
    images: Float[Tensor, "b c h w"]
    captions: Sequence[str]


def worst_masks(classifiers: Mapping[str, tuple[str, ImageClassifier]], source: ImageSource, *, seed: int) -> Picture:
    """A row for each copy that each strategy trains on, masked by the classifier it trained, answer and loss below.

    `classifiers` are name -> (strategy, classifier); those of another input size than the first are left out.
    """
    size = next(iter(classifiers.values()))[1].input_size
    same = {n: (s, c) for n, (s, c) in classifiers.items() if c.input_size == size and len(c.fill) == 3}
    strips: list[Strip] = []
    for name, (strategy, classifier) in same.items():
        images, labels = sample(source, classifier)
        words = output_words(source, classifier)
        if not strips:
            strips.append(Strip("image", images, [shortened(words[label], 22) for label in labels.tolist()]))
        strips += masked_strips(name, strategy, classifier, images, labels, words, seed=seed)
    return draw_strips(strips)


def sample(source: ImageSource, classifier: ImageClassifier) -> tuple[Float[Tensor, "b c h w"], Int64[Tensor, " b"]]:
    """A few images spread over the source, and the classifier's outputs for their labels."""
    preprocessing = default_preprocessing(
        source, classifier.input_size, interpolation=classifier.interpolation, crop_pct=classifier.crop_pct
    )
    indices = spread_indices(source, COLUMNS)
    (batch,) = iterate_batches(source, preprocessing, indices, batch_size=COLUMNS, skip_bad=True)
    outputs = torch.tensor(match_labels(source.class_names, classifier))
    return as_images(batch.images, "cpu"), outputs[batch.labels]


def output_words(source: ImageSource, classifier: ImageClassifier) -> Mapping[int, str]:
    return class_words(dict(enumerate(classifier.class_names or source.class_names)))


def masked_strips(
    name: str,
    strategy: str,
    classifier: ImageClassifier,
    images: Float[Tensor, "b c h w"],
    labels: Int64[Tensor, " b"],
    words: Mapping[int, str],
    *,
    seed: int,
) -> list[Strip]:
    chosen = masking_strategy(strategy, image_size=classifier.input_size, generator=torch.Generator().manual_seed(seed))
    if chosen.forwards + chosen.backwards > MOST_PASSES:
        return []
    keep = chosen(classifier, images, labels)
    shade = torch.tensor(SHADE, dtype=images.dtype)[:, None, None]
    strips = []
    for number, visible in enumerate(keep, start=1):
        logits = forward(classifier, occlude(images, visible, fill_colour(classifier, images)))
        losses = functional.cross_entropy(logits, labels, reduction="none").tolist()
        answers = [words[i] for i in logits.argmax(dim=1).tolist()]
        captions = [f"{shortened(answer, 22)}\n{loss:.2f}" for answer, loss in zip(answers, losses, strict=True)]
        title = f"{name} {number}" if len(keep) > 1 else name
        strips.append(Strip(title, torch.where(visible, images, shade), captions))
    return strips


def draw_strips(strips: Sequence[Strip]) -> Picture:
    count = len(strips[0].captions)
    with styled():
        figure = Figure(figsize=(1.25 * count + 0.3, 1.5 * len(strips) + 0.3), layout="constrained")
        grid = figure.subplots(len(strips), count, squeeze=False)
        for row, strip in zip(grid, strips, strict=True):
            row[0].set_ylabel(shortened(printable(strip.title), 22), fontsize=8)
            for axes, picture, caption in zip(row, strip.images, strip.captions, strict=True):
                _show(axes, picture, caption)
        title = f"What each strategy hides from its own network, n = {count} images"
        figure.suptitle(f"{title}: answer, and loss in nats", fontsize=9.5)
        return Picture("worst-masks", title, f"{title}, with the network's answer and its loss below each.", figure)


def _show(axes: Axes, picture: Tensor, caption: str) -> None:
    if max(picture.shape[1:]) > LARGEST:
        picture = functional.interpolate(picture[None], size=(LARGEST, LARGEST), mode="bilinear", antialias=True)[0]
    pixels = picture.permute(1, 2, 0).mul(255).round().to(torch.uint8).numpy()
    axes.imshow(pixels, interpolation="none")
    axes.set_xlabel(caption, fontsize=6.5)
    axes.set(xticks=[], yticks=[])
