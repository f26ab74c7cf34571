"""Certified detection by one round of masking: the right label or an alarm, never a wrong label."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from patchproof.defenses._base import Assessment, Certificates, Guarantee, MaskedDefense
from patchproof.defenses._objectives import SilentAgreement
from patchproof.defenses._table import MaskTable
from patchproof.masking import Objective
from patchproof.settings import AlarmOptions

ALARM = -1


def unanimous_label(labels: Int64[Tensor, "b n"]) -> Int64[Tensor, " b"]:
    """The label that all one-mask predictions share, or an alarm."""
    return torch.where((labels == labels[:, :1]).all(dim=1), labels[:, 0], ALARM)


@dataclass(frozen=True)
class Alarm(MaskedDefense):
    """Certified(x, y) iff F(x ⊙ m) = y for all m ∈ 𝓜, where 𝓜 covers 𝓡.

    Under attack the copy that hides the patch still answers y, so the answer is y or an alarm (−1). `predict` takes as
    many passes as there are masks, always. An alarm on a clean image is a wrong answer of the defence.
    """

    name: ClassVar[str] = "alarm"
    guarantee: ClassVar[Guarantee] = "detection"
    Options: ClassVar[type[Any]] = AlarmOptions

    def predict(self, images: Float[Tensor, "b c h w"]) -> Int64[Tensor, " b"]:
        """All one-mask labels equal: that label; otherwise −1."""
        return unanimous_label(self.copies(images).row(self.every_mask)).to(images.device)

    def certify(self, images: Float[Tensor, "b c h w"], labels: Int64[Tensor, " b"]) -> Certificates:
        """∀ m ∈ 𝓜: F(x ⊙ m) = y, giving up on an image at its first wrong label."""
        table = self.copies(images, labels)
        self.measure(images)
        rows = torch.arange(len(images))
        right = table.survivors(rows, self.central_first().expand(len(rows), -1), labels.cpu(), sure=True)
        return _certificates(table, right).to(images.device)

    def assess(self, images: Float[Tensor, "b c h w"], labels: Int64[Tensor, " b"] | None = None) -> Assessment:
        """Predict and certify from one table; without labels the certificate is about the prediction."""
        table = self.copies(images, labels)
        self.measure(images)
        predictions = unanimous_label(table.row(self.every_mask))
        if labels is None:
            table.against(predictions)  # no copy answers −1, so an alarm is not certified
        return Assessment(predictions, _certificates(table, table.right().all(dim=1))).to(images.device)

    @property
    def every_mask(self) -> Int64[Tensor, " n"]:
        return torch.arange(len(self.masks))

    def copies(self, images: Float[Tensor, "b c h w"], labels: Int64[Tensor, " b"] | None = None) -> MaskTable:
        """The table of the one-mask predictions."""
        return self.table(images, labels, (self.every_mask, self.every_mask))

    def explain(self, image: Float[Tensor, "c h w"]) -> list[int]:
        """F(x ⊙ m) for every mask."""
        return self.copies(image[None]).row(self.every_mask)[0].tolist()

    def objectives(self) -> Sequence[Objective]:
        return (SilentAgreement(self.masks),)


def _certificates(table: MaskTable, certified: Bool[Tensor, " b"]) -> Certificates:
    """`witness` names the mask of the copy that decides, and the label it answered."""
    rows, mask = torch.arange(len(certified)), table.witness()
    evidence = {"witness.masks": mask[:, None], "witness.label": table.label[rows, mask]}
    return Certificates(certified, table.margin[rows, mask], table.forwards.clone(), evidence)
