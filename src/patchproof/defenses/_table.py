"""The labels of masked copies as a table that is filled as far as it is asked for: early exit and batching.

And what the defences share that look at an image through masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from patchproof.defenses._base import Certificates, EvaluatedDefense, device_of, require_labels
from patchproof.geometry import MaskSet, PatchThreat
from patchproof.masking import Copies, Engine, Evaluator, masks_for, require_images
from patchproof.models import mask_colour
from patchproof.types import Classifier, InputError, kind_of, note

BLOCK = 4
"""Copies of an image that are evaluated before the first look at their labels; then twice as many, and so on."""

TABLE_CELLS = 1 << 22
"""Masked copies of all images of a batch that a table has room for: some 200 MB, whatever the number of masks."""


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

    def evaluate_all(self, *, settle: bool = True) -> Int64[Tensor, "b u"]:
        """Make every cell known; their labels."""
        self.evaluate(*torch.nonzero(~(self.settled if settle else self.known), as_tuple=True), settle=settle)
        return self.label

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

    def certificates(self, certified: Bool[Tensor, " b"], masks: Int64[Tensor, "u k"]) -> Certificates:
        """`witness` is the copy that decides, the failing one of least margin or else the one of least margin: its
        masks, of those that `masks` lists for every cell, and the label it answered."""
        failing = self.known & ~self.right()
        candidates = torch.where(failing.any(dim=1, keepdim=True), failing, self.known)
        rows, cell = torch.arange(len(certified)), self.margin.masked_fill(~candidates, torch.inf).argmin(dim=1)
        evidence = {"witness.masks": masks[cell], "witness.label": self.label[rows, cell]}
        return Certificates(certified, self.margin[rows, cell], self.forwards.clone(), evidence)


@dataclass(frozen=True)
class MaskedDefense(EvaluatedDefense):
    """Common ground of the defences that look at an image through an 𝓡-covering mask set 𝓜."""

    classifier: Classifier
    masks: MaskSet
    threat: PatchThreat
    engine: Engine = field(default_factory=Engine, kw_only=True)
    evaluator: Evaluator = field(init=False, repr=False, compare=False)

    evidence: ClassVar[Sequence[str]] = ("witness",)
    together: ClassVar[int] = 2
    """Masks that hide pixels of a copy."""
    most_patches: ClassVar[int] = 2

    def __post_init__(self) -> None:
        if not isinstance(self.masks, MaskSet):
            raise InputError(f"masks must be a pp.MaskSet, not {kind_of(self.masks)}")
        super().__post_init__()
        mask_colour(self.classifier)
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
        object.__setattr__(self, "evaluator", Evaluator(self.classifier, self.engine))

    @property
    def occlusions(self) -> MaskSet:
        return self.masks

    @classmethod
    def of(cls, classifier: Classifier, threat: PatchThreat, *, engine: Engine, **options: Any) -> Any:
        """With the covering masks of the threat, `per_axis` of them on each axis."""
        masks = masks_for(classifier, threat, per_axis=options.pop("per_axis"))
        return cls(classifier, masks, threat, engine=engine, **options)

    @property
    def images_at_once(self) -> int:
        """Images whose copies share chunks: enough to fill them while some images drop out, and on a slow CPU few
        enough that records come often."""
        pairs = len(self.masks) * (len(self.masks) + 1) // 2  # the more masks, the fewer images
        most = max(1, TABLE_CELLS // pairs)
        return max(1, min(most, self.chunk // (1 if device_of(self).type == "cuda" else BLOCK)))

    @property
    def most_passes(self) -> int:
        """Masked copies of an image."""
        return len(self.masks)

    def describe(self) -> dict[str, Any]:
        masks: Any
        try:
            rows, columns = (" ".join(f"{start}-{stop}" for start, stop in axis) for axis in self.masks.axes)
            masks = f"{len(self.masks.axes[0])}x{len(self.masks.axes[1])} masks, rows {rows}, columns {columns}"
        except InputError:  # masks of one's own need not form a grid
            masks = self.masks.rects
        patches = {} if self.threat.patches == 1 else {"patches": self.threat.patches}
        return super().describe() | patches | {"guarantee": self.guarantee, "masks": masks, **self.arithmetic()}

    def table(
        self,
        images: Float[Tensor, "b c h w"],
        labels: Int64[Tensor, " b"] | None,
        cells: tuple[Int64[Tensor, " u"], Int64[Tensor, " u"]],
    ) -> MaskTable:
        """A table of the copies x ⊙ m_first ⊙ m_second, filled as it is asked."""
        require_images(images, self.masks.image_size)
        return MaskTable(self.evaluator, images, self.masks.keep(images.device), *cells, labels)

    def central_first(self) -> Int64[Tensor, " n"]:
        """The masks in the order in which they are likely to fail: those of two rectangles hide more, and central ones
        hide the object more often."""
        (height, width), parts = self.masks.image_size, self.masks.parts
        offset = torch.tensor([
            sum(abs(r.top + r.bottom - height) / height + abs(r.left + r.right - width) / width for r in part)
            for part in parts
        ]).tolist()  # fmt: skip
        return torch.tensor(sorted(range(len(parts)), key=lambda mask: (-len(parts[mask]), offset[mask])))
