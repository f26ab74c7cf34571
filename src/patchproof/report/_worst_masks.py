"""What strategies hide from the networks they trained, on the same images: the paper's illustration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Bool, Float, Int64
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn import functional

from patchproof.data import ImageSource, default_preprocessing, iterate_batches, spread_indices
from patchproof.masking import as_images, network
from patchproof.models import ImageClassifier, match_labels
from patchproof.report._figures import Picture, styled
from patchproof.runs._reading import class_words, printable, shortened
from patchproof.training import masking_strategy
from patchproof.types import InputError

COLUMNS = 6
SHADE = (0.84, 0.37, 0.0)
"""Vermilion; it reads as dark grey in black and white."""

LARGEST = 112
MOST_PASSES = 100
"""A strategy that takes more passes per image is left out: a page should not take minutes."""

Strip = tuple[str, Float[Tensor, "b c h w"], Sequence[str]]
"""One row of the picture: its title, the images, under masks or not, and a caption below each."""


def worst_masks(classifiers: Mapping[str, tuple[str, ImageClassifier]], source: ImageSource, *, seed: int) -> Picture:
    """A row for each copy that each strategy trains on, masked by the classifier it trained, answer and loss below.

    `classifiers` are name -> (strategy, classifier); those of another input size than the first are left out.
    """
    size = next(iter(classifiers.values()))[1].input_size
    strips: list[Strip] = []
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


def chosen_masks(
    strategy: str, classifier: ImageClassifier, images: Tensor, labels: Tensor, *, seed: int
) -> Bool[Tensor, "copies b 1 h w"]:
    """What the strategy leaves visible; no copies where it takes too long to choose."""
    generator = torch.Generator().manual_seed(seed)
    chosen = masking_strategy(strategy, image_size=classifier.input_size, generator=generator)
    if chosen.forwards + chosen.backwards > MOST_PASSES:
        return torch.ones(0, len(images), 1, *classifier.input_size, dtype=torch.bool)
    return chosen(classifier, images, labels)


def draw_strips(strips: Sequence[Strip]) -> Picture:
    count = len(strips[0][2])
    with styled():
        figure = Figure(figsize=(1.25 * count + 0.3, 1.5 * len(strips) + 0.3), layout="constrained")
        grid = figure.subplots(len(strips), count, squeeze=False)
        for row, (name, images, captions) in zip(grid, strips, strict=True):
            row[0].set_ylabel(shortened(printable(name), 22), fontsize=8)
            if max(images.shape[2:]) > LARGEST:
                images = functional.interpolate(images, size=(LARGEST, LARGEST), mode="bilinear", antialias=True)
            for axes, image, caption in zip(row, images, captions, strict=True):
                axes.imshow(image.permute(1, 2, 0).mul(255).round().to(torch.uint8).numpy(), interpolation="none")
                axes.set_xlabel(caption, fontsize=6.5)
                axes.set(xticks=[], yticks=[])
        title = f"What each strategy hides from its own network, n = {count} images"
        figure.suptitle(f"{title}: answer, and loss in nats", fontsize=9.5)
        return Picture("worst-masks", title, f"{title}, with the network's answer and its loss below each.", figure)
