"""Undefended and certified accuracy on a fixed set of held-out images, after each epoch of training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

from patchproof.cli._setup import choose_chunk, choose_preprocessing
from patchproof.config import TrainConfig, parse_patches
from patchproof.data import ImageSource, iterate_batches, spread_indices
from patchproof.defenses import PatchCleanser
from patchproof.geometry import PatchThreat, covering_masks
from patchproof.masking import Engine, as_images, clean_labels
from patchproof.models import ImageClassifier, match_labels
from patchproof.records import Rate
from patchproof.types import InputError

IMAGES_AT_ONCE = 64


@dataclass(frozen=True)
class Validation:
    """The same images after every epoch, against the patch of the training masks with the 3×3 set."""

    source: ImageSource
    pixels: UInt8[Tensor, "n c h w"]
    labels: Int64[Tensor, " n"]
    threat: PatchThreat
    engine: Engine
    device: torch.device

    @classmethod
    def on(
        cls, source: ImageSource, classifier: ImageClassifier, config: TrainConfig, device: torch.device
    ) -> Validation:
        indices = spread_indices(source, config.validation_images)
        preprocessing = choose_preprocessing(classifier, low_resolution=source.low_resolution)
        batches = list(iterate_batches(source, preprocessing, indices, batch_size=64, skip_bad=config.skip_bad))
        if not sum(len(b.indices) for b in batches):
            raise InputError(f"none of the {len(indices)} validation images can be read")
        classes = torch.tensor(match_labels(source.class_names, classifier))
        size = classifier.input_size
        return cls(
            source,
            torch.cat([b.images for b in batches]),
            classes[torch.cat([b.labels for b in batches])],
            PatchThreat(size, parse_patches(config.mask_patch, size)),
            Engine(choose_chunk("auto", size, device)),
            device,
        )

    def measure(self, classifier: ImageClassifier) -> dict[str, Rate]:
        defense = PatchCleanser(
            classifier.eval(), covering_masks(self.threat, per_axis=3), self.threat, engine=self.engine
        )
        counts = {"undefended": 0, "certified": 0}
        for pixels, labels in self._batches():
            images = as_images(pixels, self.device)
            right = clean_labels(defense.runner, images) == labels
            counts["undefended"] += int(right.sum())
            counts["certified"] += int(defense.certify(images, labels).certified.sum())
        return {name: Rate(count, len(self.labels)) for name, count in counts.items()}

    def _batches(self) -> Sequence[tuple[Tensor, Tensor]]:
        parts = zip(self.pixels.split(IMAGES_AT_ONCE), self.labels.split(IMAGES_AT_ONCE), strict=True)
        return [(pixels, labels.to(self.device)) for pixels, labels in parts]
