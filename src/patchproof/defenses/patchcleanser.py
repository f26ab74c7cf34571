"""PatchCleanser (Xiang et al., USENIX Security 2022): double masking, and its certificate.

The paper's statements, in order: `double_masking` is Algorithm 1, `two_mask_correct` the certificate, Algorithm 2.
Which copies are evaluated when, and which not at all, is decided in `_table.py`; it changes no answer.
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
from patchproof.defenses._table import TABLE_CELLS, MaskedDefense, MaskTable
from patchproof.geometry import MaskSet
from patchproof.masking import Copies, Engine, Evaluator, Objective, require_images
from patchproof.settings import PatchCleanserOptions
from patchproof.types import Classifier


def majority_label(labels: Int64[Tensor, "b n"]) -> Int64[Tensor, " b"]:
    """The most frequent label; among equals the smallest."""
    votes = (labels[:, :, None] == labels[:, None, :]).sum(dim=2)
    most = votes == votes.amax(dim=1, keepdim=True)
    return labels.masked_fill(~most, torch.iinfo(torch.int64).max).amin(dim=1)


def double_masking(
    first: Int64[Tensor, "b n"], second: Callable[[Tensor, Tensor], Int64[Tensor, "j n"]]
) -> Int64[Tensor, " b"]:
    """Algorithm 1: the first disagreeing copy whose second round is unanimous wins, else the majority.

    `first[b, m]` = F(x_b ⊙ m). `second(image, mask)` gives F(x ⊙ mask ⊙ m) of the disagreeing copies for every further
    m; it is asked about all of them at once, so that they fill the device.
    Sound: on a certified image every copy that hides the patch answers y. So if y disagrees, its own copy is unanimous;
    and a copy with another label meets y in its second round and never wins.
    """
    majority = majority_label(first)
    image, mask = torch.nonzero(first != majority[:, None], as_tuple=True)
    wins = torch.zeros_like(first, dtype=torch.bool)
    wins[image, mask] = (second(image, mask) == first[image, mask][:, None]).all(dim=1)
    winner = first.gather(1, wins.long().argmax(dim=1, keepdim=True))[:, 0]
    return torch.where(wins.any(dim=1), winner, majority)


def two_mask_correct(right: Bool[Tensor, "b n n"]) -> Bool[Tensor, " b"]:
    """Algorithm 2, the certificate: ∀ m0, m1 ∈ 𝓜: F(x ⊙ m0 ⊙ m1) = y, m0 = m1 included.

    `right[b, m0, m1]`: that copy answers y, by enough (τ) to answer so every time.
    """
    return right.all(dim=2).all(dim=1)


@dataclass(frozen=True)
class PatchCleanser(MaskedDefense):
    """Certified(x, y) iff F(x ⊙ m0 ⊙ m1) = y for all m0, m1 ∈ 𝓜, where 𝓜 covers 𝓡.

    `exhaustive` disables early exit: every pair is evaluated, also of images already known to fail.
    """

    exhaustive: bool = field(default=False, kw_only=True)

    name: ClassVar[str] = "patchcleanser"
    Options: ClassVar[type[Any]] = PatchCleanserOptions

    @property
    def most_passes(self) -> int:
        return self.masks.union_count

    def predict(self, images: Float[Tensor, "b c h w"]) -> Int64[Tensor, " b"]:
        """Two rounds of masking (Algorithm 1); the second only of disagreeing copies, and only until contradicted."""
        pairs = self.pairs(images)
        return pairs.defended(pairs.one_mask_labels()).to(images.device)

    def certify(self, images: Float[Tensor, "b c h w"], labels: Int64[Tensor, " b"]) -> Certificates:
        """∀ m0, m1 ∈ 𝓜: F(x ⊙ m0 ⊙ m1) = y (Algorithm 2), giving up on an image at its first wrong label."""
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
            pairs.table.against(predictions)
        found = pairs.certificates(self._certified(pairs))
        unanimous = (first == first[:, :1]).all(dim=1)
        return Assessment(predictions, found, {"unanimous": unanimous}).to(images.device)

    def pairs(self, images: Float[Tensor, "b c h w"], labels: Int64[Tensor, " b"] | None = None) -> PairTable:
        unions = self.masks.unions
        return PairTable(self.table(images, labels, (unions.first, unions.second)), unions.of_pair)

    def _certified(self, pairs: PairTable) -> Bool[Tensor, " b"]:
        """Algorithm 2 on the whole table, or on as much of it as decides."""
        if self.exhaustive:
            pairs.table.evaluate_all(settle=False)
            return two_mask_correct(pairs.table.right()[:, pairs.of_pair])
        return pairs.all_right(one_mask_order=self.central_first())

    def explain(self, image: Float[Tensor, "c h w"]) -> list[list[int]]:
        """F(x ⊙ m0 ⊙ m1) for every pair of masks."""
        pairs = self.pairs(image[None])
        return pairs.table.evaluate_all()[0, pairs.of_pair].tolist()

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"exhaustive": self.exhaustive}

    def objectives(self) -> Sequence[Objective]:
        return WrongMajority(self.masks), FakeUnanimity(self.masks)


@dataclass(frozen=True)
class PairTable:
    """The table of all two-mask predictions; pairs that hide the same pixels share a cell, `of_pair[a, b]`."""

    table: MaskTable
    of_pair: Int64[Tensor, "n n"]

    @property
    def one_mask(self) -> Int64[Tensor, " n"]:
        return self.of_pair.diagonal()

    def one_mask_labels(self) -> Int64[Tensor, "b n"]:
        """The first round: F(x_b ⊙ m) for every image and mask."""
        return self.table.row(self.one_mask)

    def defended(self, first: Int64[Tensor, "b n"]) -> Int64[Tensor, " b"]:
        """Algorithm 1 on a table that is filled as it goes."""
        most = max(1, TABLE_CELLS // first.shape[1])  # copies at once, so that memory is bounded for many masks

        def second(image: Tensor, mask: Tensor) -> Tensor:
            parts = zip(image.split(most), mask.split(most), strict=True)
            return torch.cat([self.second_round(i, m, until=first[i, m]) for i, m in parts])

        return double_masking(first, second)

    def second_round(
        self, image: Int64[Tensor, " j"], mask: Int64[Tensor, " j"], *, until: Int64[Tensor, " j"] | None = None
    ) -> Int64[Tensor, "j n"]:
        """The labels of copy (image, mask) under every further mask.

        With `until`, a round is cancelled once a label differs from it: what was not evaluated repeats that label. The
        masks whose own copies contradict it most come first.
        """
        table, cells = self.table, self.of_pair[mask]
        if until is None:
            table.evaluate(image.repeat_interleave(cells.shape[1]), cells.flatten())
            return table.label[image[:, None], cells]
        label, gap = (values[image[:, None], self.one_mask] for values in (table.label, table.gap))
        against = torch.where(label == until[:, None], -gap, gap).argsort(dim=1, descending=True, stable=True)
        table.survivors(image, cells.gather(1, against), until)
        seen, labels = table.known[image[:, None], cells], table.label[image[:, None], cells]
        other = (seen & (labels != until[:, None])).long().argmax(dim=1, keepdim=True)
        return torch.where(seen, labels, labels.gather(1, other))

    def all_right(self, one_mask_order: Int64[Tensor, " n"]) -> Bool[Tensor, " b"]:
        """Algorithm 2 with early exit: one-mask copies first, then of the images left the pairs most likely to fail,
        those of the smallest sum of one-mask margins first."""
        table = self.table
        assert table.labels is not None
        images = torch.arange(len(table.images))
        order = self.one_mask[one_mask_order].expand(len(images), -1)
        alive = images[table.survivors(images, order, table.labels, sure=True)]
        margin, cells = table.margin[alive[:, None], self.one_mask], torch.nonzero(table.first != table.second)[:, 0]
        hardest = (margin[:, table.first[cells]] + margin[:, table.second[cells]]).argsort(dim=1, stable=True)
        alive = alive[table.survivors(alive, cells[hardest], table.labels[alive], sure=True)]
        return torch.zeros(len(images), dtype=torch.bool).index_fill_(0, alive, True)

    def certificates(self, certified: Bool[Tensor, " b"]) -> Certificates:
        """`witness` names the two masks of the copy that decides, and the label it answered."""
        return self.table.certificates(certified, torch.stack([self.table.first, self.table.second], dim=1))


def two_mask_labels(
    classifier: Classifier, images: Float[Tensor, "b c h w"], masks: MaskSet, *, engine: Engine | None = None
) -> Int64[Tensor, "b n n"]:
    """The whole table F(x_b ⊙ m0 ⊙ m1): entry [b, 0, 0] is one mask alone, the table is symmetric."""
    require_images(images, masks.image_size)
    unions, count = masks.unions, len(images)
    image = torch.arange(count).repeat_interleave(len(unions))
    copies = Copies(image, unions.first.repeat(count), unions.second.repeat(count))
    found = Evaluator(classifier, engine or Engine()).answers(images, masks.keep(images.device), copies)
    return found.label.unflatten(0, (count, len(unions)))[:, unions.of_pair].to(images.device)
