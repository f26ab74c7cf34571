"""The labels of masked copies as a table that is filled as far as it is asked for: early exit and batching."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from patchproof.masking import Copies, Evaluator, label_range, require_classes
from patchproof.types import InputError

BLOCK = 4
"""Copies of an image that are evaluated before the first look at their labels; then twice as many, and so on."""


def require_labels(labels: Tensor, count: int, *, classes: int | None = None) -> None:
    """Refuse what is no label for each of `count` images, or where `classes` is known no output of the classifier."""
    if not (isinstance(labels, Tensor) and labels.shape == (count,) and labels.dtype == torch.int64):
        given = f"{labels.dtype} of {tuple(labels.shape)}" if isinstance(labels, Tensor) else type(labels).__name__
        raise InputError(f"labels must be a tensor of one int64 number for each of the {count} images, not {given}")
    if classes is not None:
        require_classes(label_range(labels), classes)


@dataclass
class MaskTable:
    """F(x_b ⊙ m_first[u] ⊙ m_second[u]), cell by cell: each is evaluated when first asked for, once, and remembered.

    `labels`, when given, are those that `margin` is about; without them a margin is the gap to the runner-up. The
    images stay on their device; the table itself is kept on the CPU, where the next passes are planned.
    """

    evaluator: Evaluator
    images: Float[Tensor, "b c h w"]
    keep: Bool[Tensor, "n 1 h w"]
    first: Int64[Tensor, " u"]
    second: Int64[Tensor, " u"]
    labels: Int64[Tensor, " b"] | None = None

    def __post_init__(self) -> None:
        self.evaluator.refresh()
        shape = len(self.images), len(self.first)
        self.known = torch.zeros(shape, dtype=torch.bool)
        self.settled = torch.zeros(shape, dtype=torch.bool)
        self.label = torch.zeros(shape, dtype=torch.int64)
        self.gap = torch.zeros(shape, dtype=torch.float32)
        self.margin = torch.zeros(shape, dtype=torch.float32)
        self.forwards = torch.zeros(len(self.images), dtype=torch.int64)
        if self.labels is not None:
            self.against(self.labels)

    def against(self, labels: Int64[Tensor, " b"]) -> MaskTable:
        """Measure margins against these labels from now on; what is settled is kept.

        In a known cell that answers another label only the gap is left, and −gap bounds the margin from above.
        """
        require_labels(labels, len(self.images))
        self.known &= self.settled
        self.labels = labels.cpu()
        self.margin = torch.where(self.label == self.labels[:, None], self.gap, -self.gap)
        return self

    def evaluate(self, image: Int64[Tensor, " j"], cell: Int64[Tensor, " j"], *, settle: bool = True) -> None:
        """Make these cells known; without `settle`, only whether they answer their image's label, as a certificate
        asks."""
        asked = torch.zeros_like(self.known)
        asked[image, cell] = True  # each cell once, however often it was named
        image, cell = torch.nonzero(asked & ~(self.settled if settle else self.known), as_tuple=True)
        copies = Copies(image, self.first[cell], self.second[cell])
        found = self.evaluator.answers(self.images, self.keep, copies, self.labels, settle=settle)
        self.label[image, cell], self.gap[image, cell], self.margin[image, cell] = found.label, found.gap, found.margin
        self.forwards.index_add_(0, image, found.passes)
        self.known[image, cell] = True
        self.settled[image, cell] = settle

    def evaluate_all(self, *, settle: bool = True) -> None:
        """Make every cell known."""
        self.evaluate(*torch.nonzero(~(self.settled if settle else self.known), as_tuple=True), settle=settle)

    def row(self, cells: Int64[Tensor, " k"]) -> Int64[Tensor, "b k"]:
        """The labels of every image in these cells."""
        rows = torch.arange(len(self.images))
        self.evaluate(rows.repeat_interleave(len(cells)), cells.repeat(len(rows)))
        return self.label[:, cells]

    def survivors(
        self,
        image: Int64[Tensor, " j"],
        order: Int64[Tensor, "j u"],
        labels: Int64[Tensor, " j"],
        *,
        sure: bool = False,
    ) -> Bool[Tensor, " j"]:
        """Which rows of cells all answer their label (`sure`: with margin τ)? Evaluated block by block in each row's
        own order, a row only until it fails.

        Blocks start small and double: most rows fail early or not at all. They depend on the row alone, so its cost
        does not change with the batch it came in; what is left of all rows is packed into whole chunks.
        """
        alive = torch.arange(len(image))
        start, block = 0, BLOCK
        while start < order.shape[1] and len(alive):
            cell, rows = order[alive, start : start + block], image[alive]
            self.evaluate(rows.repeat_interleave(cell.shape[1]), cell.flatten(), settle=not sure)
            right = self._answers(rows[:, None], cell, labels[alive][:, None], sure=sure)
            alive = alive[right.all(dim=1)]
            start, block = start + block, 2 * block
        return torch.zeros(len(image), dtype=torch.bool).index_fill_(0, alive, True)

    def right(self) -> Bool[Tensor, "b u"]:
        """Which known cells answer their image's label with margin τ, so that they answer so every time?"""
        if self.labels is None:
            raise InputError("a certificate is about a label; give the table labels, or call against(labels)")
        rows, cells = torch.arange(len(self.images))[:, None], torch.arange(self.known.shape[1])[None]
        return self.known & self._answers(rows, cells, self.labels[:, None], sure=True)

    def _answers(self, image: Tensor, cell: Tensor, label: Tensor, *, sure: bool) -> Bool[Tensor, "j u"]:
        same = self.label[image, cell] == label
        if not sure:
            return same
        gap = self.gap[image, cell]
        tau = self.evaluator.measured.tau_fp32 if gap.numel() else 0.0  # no image, no τ
        return same & (gap > 0) & (gap >= tau) & gap.isfinite()  # a tie is no lead, whatever τ

    def witness(self) -> Int64[Tensor, " b"]:
        """For each image the known cell that decides: the failing one of least margin, else the one of least margin."""
        failing = self.known & ~self.right()
        candidates = torch.where(failing.any(dim=1, keepdim=True), failing, self.known)
        return self.margin.masked_fill(~candidates, torch.inf).argmin(dim=1)
