"""PatchCleanser (Xiang et al., USENIX Security 2022): double masking, and its certificate.

`double_masking` is Algorithm 1 of the paper, `two_mask_correct` is Algorithm 2. `PairTable` and `_table.py` decide
which copies are evaluated in which order, and which are skipped; that changes no prediction and no certificate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from patchproof.defenses._base import Assessment, Certificates
from patchproof.defenses._objectives import FakeUnanimity, WrongMajority
from patchproof.defenses._table import BYTES_PER_CELL, TABLE_CELLS, MaskedDefense, MaskTable
from patchproof.geometry import MaskSet
from patchproof.masking import Engine, Evaluator, Objective
from patchproof.settings import PatchCleanserOptions
from patchproof.types import Classifier

BYTES_PER_PAIR, BYTES_PER_COMPARED_PAIR = 24, 200
"""Bytes per pair of masks: two mask indices and a table entry; more if pairs that may hide the same are compared."""


def majority_label(labels: Int64[Tensor, "b n"]) -> Int64[Tensor, " b"]:
    """The most frequent label; among equally frequent ones the smallest."""
    votes = (labels[:, :, None] == labels[:, None, :]).sum(dim=2)
    most = votes == votes.amax(dim=1, keepdim=True)
    return labels.masked_fill(~most, torch.iinfo(torch.int64).max).amin(dim=1)


def double_masking(
    first: Int64[Tensor, "b n"], second: Callable[[Tensor, Tensor], Int64[Tensor, "j n"]]
) -> Int64[Tensor, " b"]:
    """Algorithm 1: the first disagreeing copy whose second round is unanimous wins, otherwise the majority wins.

    `first[b, m]` = F(x_b ⊙ m). `second(image, mask)` returns F(x ⊙ mask ⊙ m) of the disagreeing copies for every m ∈ 𝓜;
    it is called once with all disagreeing copies, so that they fill the device.

    Proof: on a certified image every copy whose masks hide the patch gives y. If y is not the majority, a one-mask copy
    that hides the patch disagrees, and its second round is unanimous for y. A disagreeing copy with another label meets
    y under the mask that hides the patch, so it never wins.
    """
    majority = majority_label(first)
    image, mask = torch.nonzero(first != majority[:, None], as_tuple=True)
    wins = torch.zeros_like(first, dtype=torch.bool)
    wins[image, mask] = (second(image, mask) == first[image, mask][:, None]).all(dim=1)
    winner = first.gather(1, wins.long().argmax(dim=1, keepdim=True))[:, 0]
    return torch.where(wins.any(dim=1), winner, majority)


def two_mask_correct(right: Bool[Tensor, "b n n"]) -> Bool[Tensor, " b"]:
    """Algorithm 2, the certificate: ∀ m0, m1 ∈ 𝓜: F(x ⊙ m0 ⊙ m1) = y, m0 = m1 included.

    `right[b, m0, m1]` is True if that copy is predicted as y with a margin of at least τ.
    """
    return right.all(dim=2).all(dim=1)


@dataclass(frozen=True)
class PatchCleanser(MaskedDefense):
    """Certified(x, y) iff F(x ⊙ m0 ⊙ m1) = y for all m0, m1 ∈ 𝓜, where 𝓜 covers 𝓡.

    `exhaustive` disables early exit: every pair of masks is evaluated, also for images already known to fail.
    """

    exhaustive: bool = field(default=False, kw_only=True)

    name: ClassVar[str] = "patchcleanser"
    Options: ClassVar[type[Any]] = PatchCleanserOptions

    @property
    def most_passes(self) -> int:
        return self.masks.union_count

    def table_bytes(self, masks: MaskSet) -> int:
        """Memory for these masks, the table of their pairs, and the table of one image."""
        count, each = len(masks), BYTES_PER_PAIR if masks.alike else BYTES_PER_COMPARED_PAIR
        more_cells = masks.union_count - count
        return super().table_bytes(masks) + BYTES_PER_CELL * more_cells + each * count * (count + 1) // 2

    def predict(self, images: Float[Tensor, "b c h w"]) -> Int64[Tensor, " b"]:
        """Predict by two rounds of masking (Algorithm 1); a second round stops at the first contradicting label."""
        pairs = self.pairs(images)
        return pairs.defended(pairs.one_mask_labels()).to(images.device)

    def certify(self, images: Float[Tensor, "b c h w"], labels: Int64[Tensor, " b"]) -> Certificates:
        """Certify ∀ m0, m1 ∈ 𝓜: F(x ⊙ m0 ⊙ m1) = y (Algorithm 2), and give up on an image at its first wrong label."""
        pairs = self.pairs(images, labels)
        self.measure(images)
        return pairs.certificates(self._certified(pairs)).to(images.device)

    def assess(self, images: Float[Tensor, "b c h w"], labels: Int64[Tensor, " b"] | None = None) -> Assessment:
        """Predict and certify from one table, so that no copy is evaluated for both.

        Without labels the certificate is about the prediction: no patch on this very image changes the answer.
        """
        pairs = self.pairs(images, labels)
        self.measure(images)
        first = pairs.one_mask_labels()
        predictions = pairs.defended(first)
        if labels is None:
            pairs.against(predictions)
        found = pairs.certificates(self._certified(pairs))
        unanimous = (first == first[:, :1]).all(dim=1)
        return Assessment(predictions, found, {"unanimous": unanimous}).to(images.device)

    def pairs(self, images: Float[Tensor, "b c h w"], labels: Int64[Tensor, " b"] | None = None) -> PairTable:
        return PairTable(self.evaluator, images, self.masks, labels)

    def _certified(self, pairs: PairTable) -> Bool[Tensor, " b"]:
        """Algorithm 2, on the whole table or with early exit."""
        if self.exhaustive:
            pairs.evaluate_all(settle=False)
            return two_mask_correct(pairs.right()[:, pairs.of_pair])
        return pairs.all_right()

    def explain(self, image: Float[Tensor, "c h w"]) -> list[list[int]]:
        """F(x ⊙ m0 ⊙ m1) for every pair of masks, as JSON."""
        return self.pairs(image[None]).two_mask_labels()[0].tolist()

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"exhaustive": self.exhaustive}

    def objectives(self) -> Sequence[Objective]:
        return WrongMajority(self.masks), FakeUnanimity(self.masks)


class PairTable(MaskTable):
    """The table of all two-mask predictions; `of_pair[a, b]` is the cell of masks a and b, and of equal unions."""

    @property
    def of_pair(self) -> Int64[Tensor, "n n"]:
        return self.masks.unions.of_pair

    def cells(self) -> tuple[Int64[Tensor, " u"], Int64[Tensor, " u"], Int64[Tensor, " n"]]:
        return self.masks.unions.first, self.masks.unions.second, self.of_pair.diagonal()

    def two_mask_labels(self) -> Int64[Tensor, "b n n"]:
        """F(x_b ⊙ m0 ⊙ m1) for every image and pair of masks."""
        return self.evaluate_all()[:, self.of_pair]

    def defended(self, first: Int64[Tensor, "b n"]) -> Int64[Tensor, " b"]:
        """Algorithm 1, where the second round of each disagreeing copy is evaluated until it is contradicted."""
        at_once = max(1, TABLE_CELLS // first.shape[1])  # bounds the memory when there are many masks

        def second(image: Tensor, mask: Tensor) -> Tensor:
            parts = zip(image.split(at_once), mask.split(at_once), strict=True)
            return torch.cat([self.second_round(i, m, until=first[i, m]) for i, m in parts])

        return double_masking(first, second)

    def second_round(
        self, image: Int64[Tensor, " j"], mask: Int64[Tensor, " j"], *, until: Int64[Tensor, " j"] | None = None
    ) -> Int64[Tensor, "j n"]:
        """F(x ⊙ mask ⊙ m) of the copies (image, mask) for every m ∈ 𝓜.

        With `until`, a round ends as soon as a label differs from `until`, and skipped copies repeat that label.
        Masks whose one-mask copies contradict `until` with the largest margin come first.
        """
        rows, cells = image[:, None], self.of_pair[mask]
        if until is None:
            self.evaluate(rows, cells)
            return self.label[rows, cells]
        label, gap = self.label[rows, self.one_mask], self.gap[rows, self.one_mask]
        order = torch.where(label == until[:, None], -gap, gap).argsort(dim=1, descending=True, stable=True)
        self.survivors(image, cells.gather(1, order), until)
        seen, labels = self.known[rows, cells], self.label[rows, cells]
        contradiction = (seen & (labels != until[:, None])).long().argmax(dim=1, keepdim=True)
        return torch.where(seen, labels, labels.gather(1, contradiction))

    def all_right(self) -> Bool[Tensor, " b"]:
        """Algorithm 2 with early exit: one-mask copies first, then the pairs with the smallest one-mask margins."""
        assert self.labels is not None
        right = super().all_right()
        alive = torch.nonzero(right)[:, 0]
        margin = self.margin[alive[:, None], self.one_mask]
        pairs = torch.nonzero(self.first != self.second)[:, 0]
        hardest = (margin[:, self.first[pairs]] + margin[:, self.second[pairs]]).argsort(dim=1, stable=True)
        right[alive] = self.survivors(alive, pairs[hardest], self.labels[alive], sure=True)
        return right

    def masks_of(self, cell: Int64[Tensor, " b"]) -> Int64[Tensor, "b 2"]:
        return torch.stack([self.first[cell], self.second[cell]], dim=1)


def two_mask_labels(
    classifier: Classifier, images: Float[Tensor, "b c h w"], masks: MaskSet, *, engine: Engine | None = None
) -> Int64[Tensor, "b n n"]:
    """The whole table F(x_b ⊙ m0 ⊙ m1), symmetric in the masks; its diagonal holds the one-mask predictions."""
    table = PairTable(Evaluator(classifier, engine or Engine()), images, masks)
    return table.two_mask_labels().to(images.device)
