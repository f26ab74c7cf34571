"""The two-mask table of one image, whole: every cell's label and margin."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from patchproof.defenses import PatchCleanser
from patchproof.masking import TwoMaskTable


@dataclass(frozen=True, eq=False)
class PairTable:
    """F(x ⊙ m_a ⊙ m_b) for all a, b: what each copy answers, and by how much `label` leads in it.

    `right`: the copy answers `label`, and by enough (τ) to answer so every time.
    """

    label: int
    labels: Int64[Tensor, "n n"]
    margins: Float[Tensor, "n n"]
    right: Bool[Tensor, "n n"]

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def certified(self) -> bool:
        """∀ a, b: F(x ⊙ m_a ⊙ m_b) = y (PatchCleanser Alg. 2)."""
        return bool(self.right.all())

    @property
    def pairs(self) -> int:
        """Unordered pairs, a mask with itself included."""
        return len(self) * (len(self) + 1) // 2

    @property
    def failing(self) -> int:
        """Unordered pairs whose copy is not right."""
        return int(torch.triu(~self.right).sum())

    @property
    def weakest(self) -> tuple[int, int]:
        """The failing pair of least margin; where none fails, the pair of least margin."""
        candidates = self.right if self.certified else ~self.right
        margins = self.margins.nan_to_num(-torch.inf).masked_fill(~candidates, torch.inf)
        first, second = divmod(int(margins.argmin()), len(self))
        return first, second


def pair_table(defense: PatchCleanser, image: Float[Tensor, "c h w"], label: int | None = None) -> PairTable:
    """Every cell evaluated, none given up early. Without a label, margins are about the defence's own answer."""
    images = image[None]
    about = defense.predict(images).cpu() if label is None else torch.tensor([label])
    table = TwoMaskTable(defense.runner, images, defense.masks, about)
    table.evaluate_all()
    cells = table.of_pair
    return PairTable(int(about[0]), table.label[0, cells], table.margin[0, cells], table.right()[0, cells])
