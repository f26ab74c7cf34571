"""A `small` network that reads Fashion-MNIST under masks, made in seconds."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

from patchproof.data import default_preprocessing, iterate_batches, open_dataset
from patchproof.geometry import PatchThreat, covering_masks
from patchproof.masking import as_images, fill_colour, occlude
from patchproof.models import ImageClassifier, load_classifier, save_checkpoint

STEPS, BATCH = 45, 48


@cache
def fitted_classifier() -> ImageClassifier:
    """A few dozen steps on copies under two random masks: right on three of four test images, a third certified."""
    source = open_dataset("fashion-mini", split="train")
    classifier = load_classifier("small", "random", class_names=source.class_names, seed=0)
    threat = PatchThreat.square(image_size=classifier.input_size, percent=3)
    keep = covering_masks(threat, per_axis=3).keep()
    generator = torch.Generator().manual_seed(0)
    indices = torch.randperm(len(source), generator=generator)[: STEPS * BATCH].tolist()
    optimizer = torch.optim.SGD(classifier.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.15, total_steps=STEPS)
    classifier.train()
    preprocessing = default_preprocessing(source, classifier.input_size)
    for batch in iterate_batches(source, preprocessing, indices, batch_size=BATCH):
        images = as_images(batch.images, "cpu")
        first, second = torch.randint(len(keep), (2, len(images)), generator=generator)
        masked = occlude(images, keep[first] & keep[second], fill_colour(classifier, images))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(classifier(masked), batch.labels).backward()
        optimizer.step()
        schedule.step()
    optimizer.zero_grad()
    return classifier.eval()


def fitted_checkpoint(folder: Path) -> Path:
    save_checkpoint(fitted_classifier(), folder)
    return folder
