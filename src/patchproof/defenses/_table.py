"""A lazily filled table of masked predictions (early exit and batching), and the base class of masking defences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from patchproof.defenses._base import Certificates, EvaluatedDefense, device_of, require_labels
from patchproof.geometry import MaskSet, PatchThreat, Rect
from patchproof.masking import Copies, Engine, Evaluator, masks_for, require_images
from patchproof.types import Classifier, InputError, kind_of, note

BLOCK = 4
"""Masked copies per image in the first block; each later block is twice as large."""

TABLE_CELLS = 1 << 22
"""Most masked copies, over all images of a batch, that a table has room for: some 200 MB."""

BYTES_PER_CELL = 75
"""Bytes per masked copy of an image: a cell of its table, its place in the order, and the copy to evaluate."""


@dataclass
class MaskTable:
    """The table of F(x_b ⊙ m_u) for every mask; each cell (b, u) is evaluated once, when it is first needed.

    A margin is that of the image's label in `labels`, or without labels the gap to the runner-up. A cell is `known` if
    it is known whether it predicts the label, and `settled` if its own label is certain too. Images stay on their
    device; the table is kept on the CPU, where the next passes are planned.
    """

    evaluator: Evaluator
    images: Float[Tensor, "b c h w"]
    masks: MaskSet
    labels: Int64[Tensor, " b"] | None = None

    def __post_init__(self) -> None:
        require_images(self.images, self.masks.image_size)
        self.keep = self.masks.keep(self.images.device)
        self.first, self.second, self.one_mask = self.cells()
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

    def cells(self) -> tuple[Int64[Tensor, " u"], Int64[Tensor, " u"], Int64[Tensor, " n"]]:
        """`first` and `second`, the two masks of each cell, and `one_mask`, the cell of each mask alone."""
        every = torch.arange(len(self.masks))
        return every, every, every

    def against(self, labels: Int64[Tensor, " b"]) -> None:
        """Measure margins against these labels from now on; settled cells are kept.

        For a kept cell that predicts another label only the gap is stored, and −gap bounds the margin from above.
        """
        require_labels(labels, len(self.images))
        self.known &= self.settled
        self.labels = labels.cpu()
        self.margin = torch.where(self.label == self.labels[:, None], self.gap, -self.gap)

    def evaluate(self, image: Tensor | slice, cell: Tensor | slice, *, settle: bool = True) -> None:
        """Make the cells [image, cell] settled, or without `settle` only known, which is enough for a certificate."""
        asked = torch.zeros_like(self.known)
        asked[image, cell] = True  # a cell that is named twice is evaluated once
        image, cell = torch.nonzero(asked & ~(self.settled if settle else self.known), as_tuple=True)
        copies = Copies(image, self.first[cell], self.second[cell])
        found = self.evaluator.answers(self.images, self.keep, copies, self.labels, settle=settle)
        self.label[image, cell], self.gap[image, cell], self.margin[image, cell] = found.label, found.gap, found.margin
        self.forwards.index_add_(0, image, found.passes)
        self.known[image, cell] = True
        self.settled[image, cell] = settle

    def evaluate_all(self, *, settle: bool = True) -> Int64[Tensor, "b u"]:
        """Evaluate every cell, and return all labels."""
        self.evaluate(slice(None), slice(None), settle=settle)
        return self.label

    def one_mask_labels(self) -> Int64[Tensor, "b n"]:
        """The first round: F(x_b ⊙ m) for every image and mask."""
        self.evaluate(slice(None), self.one_mask)
        return self.label[:, self.one_mask]

    def all_right(self) -> Bool[Tensor, " b"]:
        """∀ m ∈ 𝓜: F(x ⊙ m) = y with margin τ; the passes of an image end with its first wrong label."""
        assert self.labels is not None
        every = torch.arange(len(self.images))
        return self.survivors(every, self.one_mask[self.central_first()].expand(len(every), -1), self.labels, sure=True)

    def survivors(
        self, image: Int64[Tensor, " j"], order: Int64[Tensor, "j u"], labels: Tensor, *, sure: bool = False
    ) -> Bool[Tensor, " j"]:
        """True for each row whose cells all predict its label (`sure`: with margin τ); a row stops when it fails.

        Row j evaluates the cells `order[j]` of `image[j]` in blocks that start small and double, because most rows fail
        early or not at all. The blocks depend on the row alone, so the passes of an image are independent of the rest
        of the batch; the blocks of all rows share chunks.
        """
        alive = torch.arange(len(image))
        start, block = 0, BLOCK
        while start < order.shape[1] and len(alive):
            cell, rows = order[alive, start : start + block], image[alive]
            self.evaluate(rows[:, None], cell, settle=not sure)
            right = self._answers(rows[:, None], cell, labels[alive][:, None], sure=sure)
            alive = alive[right.all(dim=1)]
            start, block = start + block, 2 * block
        return torch.zeros(len(image), dtype=torch.bool).index_fill_(0, alive, True)

    def right(self) -> Bool[Tensor, "b u"]:
        """True for known cells that predict their image's label with margin τ, so that they do so every time."""
        if self.labels is None:
            raise InputError("a certificate is about a label; give the table labels, or call against(labels)")
        return self.known & self._answers(slice(None), slice(None), self.labels[:, None], sure=True)

    def _answers(self, image: Any, cell: Any, label: Tensor, *, sure: bool) -> Bool[Tensor, "j u"]:
        same = self.label[image, cell] == label
        if not sure:
            return same
        gap = self.gap[image, cell]
        tau = self.evaluator.measured.tau_fp32 if gap.numel() else 0.0  # no image, no τ
        return same & (gap > 0) & (gap >= tau) & gap.isfinite()  # a tie is no lead, whatever τ

    def central_first(self) -> Int64[Tensor, " n"]:
        """The masks, most likely to fail first: two rectangles hide more, central ones hide the object more often."""
        height, width = self.masks.image_size

        def rank(rects: tuple[Rect, ...]) -> tuple[int, float]:
            offset = sum(abs(r.top + r.bottom - height) / height + abs(r.left + r.right - width) / width for r in rects)
            return -len(rects), float(torch.tensor(offset))  # rounded to float32, so that symmetric masks tie

        order = sorted(range(len(self.masks.parts)), key=lambda mask: rank(self.masks.parts[mask]))
        return torch.tensor(order)

    def masks_of(self, cell: Int64[Tensor, " b"]) -> Int64[Tensor, "b k"]:
        """The masks of these cells, as certificates name them."""
        return self.first[cell, None]

    def certificates(self, certified: Bool[Tensor, " b"]) -> Certificates:
        """Certificates whose `witness` is the copy of smallest margin, among the failing copies if there are any.

        The witness gives the masks of that copy and its predicted label.
        """
        failing = self.known & ~self.right()
        candidates = torch.where(failing.any(dim=1, keepdim=True), failing, self.known)
        rows, cell = torch.arange(len(certified)), self.margin.masked_fill(~candidates, torch.inf).argmin(dim=1)
        evidence = {"witness.masks": self.masks_of(cell), "witness.label": self.label[rows, cell]}
        return Certificates(certified, self.margin[rows, cell], self.forwards.clone(), evidence)


@dataclass(frozen=True)
class MaskedDefense(EvaluatedDefense):
    """Base class of the defences that predict from copies under an 𝓡-covering mask set 𝓜."""

    classifier: Classifier
    masks: MaskSet
    threat: PatchThreat
    engine: Engine = field(default_factory=Engine, kw_only=True)

    evidence: ClassVar[Sequence[str]] = ("witness",)
    together: ClassVar[int] = 2
    """Number of masks on one copy."""
    most_patches: ClassVar[int] = 2

    def __post_init__(self) -> None:
        if not isinstance(self.masks, MaskSet):
            raise InputError(f"masks must be a pp.MaskSet, not {kind_of(self.masks)}")
        super().__post_init__()
        missed = self.masks.uncovered(self.threat)
        if missed:
            what = "patch positions" if self.threat.patches == 1 else "pairs of patch positions"
            raise InputError(
                f"masks do not cover the threat: {len(missed)} {what} are hidden by no mask, "
                f"e.g. {next(iter(missed))}; build them with covering_masks(threat, per_axis=…)"
            )
        if self.masks.hide_all(self.together):
            note(
                "some masked copies show nothing of the image, so only images of one class can be certified; take a "
                "smaller patch, or more masks per axis"
            )

    @property
    def occlusions(self) -> MaskSet:
        return self.masks

    @classmethod
    def of(cls, classifier: Classifier, threat: PatchThreat, *, engine: Engine, **options: Any) -> Any:
        """Build the defence with the covering masks of the threat, `per_axis` of them on each axis."""
        masks = masks_for(classifier, threat, per_axis=options.pop("per_axis"))
        return cls(classifier, masks, threat, engine=engine, **options)

    @property
    def images_at_once(self) -> int:
        """Images per batch: enough to fill chunks when images drop out; fewer on a slow CPU, for early records."""
        pairs = len(self.masks) * (len(self.masks) + 1) // 2
        images = self.chunk if device_of(self).type == "cuda" else self.chunk // BLOCK
        return max(1, min(images, TABLE_CELLS // pairs))

    @property
    def most_passes(self) -> int:
        """Most passes per image: one per mask."""
        return len(self.masks)

    def table_bytes(self, masks: MaskSet) -> int:
        """Memory for these masks and the table of one image."""
        height, width = masks.image_size
        return len(masks) * (height * width + BYTES_PER_CELL)

    def describe(self) -> dict[str, Any]:
        masks: Any
        try:
            rows, columns = (" ".join(f"{start}-{stop}" for start, stop in axis) for axis in self.masks.axes)
            masks = f"{len(self.masks.axes[0])}x{len(self.masks.axes[1])} masks, rows {rows}, columns {columns}"
        except InputError:  # a user's own masks need not form a grid
            masks = self.masks.rects
        patches = {} if self.threat.patches == 1 else {"patches": self.threat.patches}
        return super().describe() | patches | {"guarantee": self.guarantee, "masks": masks, **self.arithmetic()}
