"""A picture of the masks that strategies choose for the same images."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from patchproof.cli._setup import choose_preprocessing
from patchproof.data import iterate_batches, open_dataset, spread_indices
from patchproof.masking import as_images, fill_colour, forward, occlude
from patchproof.models import ImageClassifier, load_checkpoint
from patchproof.training import masking_strategy

COLUMNS = 8
SHADE = np.array([0.85, 0.25, 0.1])  # reads as dark grey in black and white


def draw_worst_masks(checkpoints: Mapping[str, Path], path: Path, *, seed: int) -> None:
    """One row for each copy each strategy trains on, masked by the classifier it trained, label and loss below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    classifiers = {name: load_checkpoint(folder) for name, folder in checkpoints.items()}
    images, labels, names = _sample(next(iter(classifiers.values())))
    rows = [("image", images, [names[label] for label in labels.tolist()])]
    for strategy, classifier in classifiers.items():
        rows += _masked_rows(strategy, classifier, images, labels, names, seed)
    figure, axes = pyplot.subplots(len(rows), COLUMNS, figsize=(1.5 * COLUMNS, 1.75 * len(rows)), squeeze=False)
    for row, (title, pictures, captions) in zip(axes, rows, strict=True):
        row[0].text(-0.12, 0.5, title, transform=row[0].transAxes, rotation=90, ha="right", va="center", fontsize=9)
        for axis, picture, caption in zip(row, pictures, captions, strict=True):
            axis.imshow(picture.permute(1, 2, 0).numpy(), interpolation="nearest")
            axis.set_xlabel(caption, fontsize=7)
            axis.set(xticks=[], yticks=[])
    figure.suptitle("What each strategy hides from its own network, and what the network answers (loss)", fontsize=11)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _sample(classifier: ImageClassifier) -> tuple[Tensor, Tensor, tuple[str, ...]]:
    source = open_dataset("fashion-mini")
    preprocessing = choose_preprocessing(classifier, low_resolution=True)
    (batch,) = iterate_batches(source, preprocessing, spread_indices(source, COLUMNS), batch_size=COLUMNS)
    return as_images(batch.images, "cpu"), batch.labels, source.class_names


def _masked_rows(
    strategy: str,
    classifier: ImageClassifier,
    images: Tensor,
    labels: Tensor,
    names: tuple[str, ...],
    seed: int,
) -> list[tuple[str, Tensor, list[str]]]:
    generator = torch.Generator().manual_seed(seed)
    keep = masking_strategy(strategy, image_size=classifier.input_size, generator=generator)(classifier, images, labels)
    rows = []
    for number, visible in enumerate(keep, start=1):
        logits = forward(classifier, occlude(images, visible, fill_colour(classifier, images)))
        losses = functional.cross_entropy(logits, labels, reduction="none").tolist()
        answers = [names[i] for i in logits.argmax(dim=1).tolist()]
        captions = [f"{answer} ({loss:.2f})" for answer, loss in zip(answers, losses, strict=True)]
        shown = torch.where(visible, images, torch.tensor(SHADE, dtype=images.dtype)[:, None, None])
        rows.append((f"{strategy} {number}" if len(keep) > 1 else strategy, shown, captions))
    return rows
