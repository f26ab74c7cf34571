"""Certified detection by one round of masking: under any patch the right label or an alarm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from patchproof.defenses._base import Assessment, Certificates, Guarantee
from patchproof.defenses._objectives import SilentAgreement
from patchproof.defenses._table import MaskedDefense, MaskTable
from patchproof.masking import Objective
from patchproof.settings import AlarmOptions


def unanimous_label(labels: Int64[Tensor, "b n"]) -> Int64[Tensor, " b"]:
    """The label that all one-mask predictions share, or −1, an alarm, if they differ."""
    return torch.where((labels == labels[:, :1]).all(dim=1), labels[:, 0], -1)


@dataclass(frozen=True)
class Alarm(MaskedDefense):
    """Certified(x, y) iff F(x ⊙ m) = y for all m ∈ 𝓜, where 𝓜 covers 𝓡.

    Under attack the copy that hides the patch is still predicted as y, so the answer is y or an alarm (−1). `predict`
    always takes one pass per mask. An alarm on a clean image counts as a wrong prediction.
    """

    name: ClassVar[str] = "alarm"
    guarantee: ClassVar[Guarantee] = "detection"
    together: ClassVar[int] = 1
    Options: ClassVar[type[Any]] = AlarmOptions

    def predict(self, images: Float[Tensor, "b c h w"]) -> Int64[Tensor, " b"]:
        """Return the label shared by all one-mask predictions, otherwise −1."""
        return unanimous_label(self.table(images).one_mask_labels()).to(images.device)

    def certify(self, images: Float[Tensor, "b c h w"], labels: Int64[Tensor, " b"]) -> Certificates:
        """Certify ∀ m ∈ 𝓜: F(x ⊙ m) = y, and give up on an image at its first wrong label."""
        table = self.table(images, labels)
        self.measure(images)
        return table.certificates(table.all_right()).to(images.device)

    def assess(self, images: Float[Tensor, "b c h w"], labels: Int64[Tensor, " b"] | None = None) -> Assessment:
        """Predict and certify from one table; without labels the certificate is about the prediction."""
        table = self.table(images, labels)
        self.measure(images)
        predictions = unanimous_label(table.one_mask_labels())
        if labels is None:
            table.against(predictions)  # no copy is predicted as −1, so an alarm is not certified
        return Assessment(predictions, table.certificates(table.right().all(dim=1))).to(images.device)

    def table(self, images: Float[Tensor, "b c h w"], labels: Int64[Tensor, " b"] | None = None) -> MaskTable:
        return MaskTable(self.evaluator, images, self.masks, labels)

    def explain(self, image: Float[Tensor, "c h w"]) -> list[int]:
        """F(x ⊙ m) for every mask."""
        return self.table(image[None]).one_mask_labels()[0].tolist()

    def objectives(self) -> Sequence[Objective]:
        return (SilentAgreement(self.masks),)
