"""The two-mask table F(x_b ⊙ m0 ⊙ m1), filled as far as it is asked for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from patchproof.geometry import MaskSet
from patchproof.masking._logits import label_margin, label_range, require_classes, top_two
from patchproof.masking._runner import Copies, Engine, Runner
from patchproof.types import Classifier, InputError, Precision

BLOCK = 4
"""Copies of an image that are evaluated before the first look at their labels; then twice as many, and so on."""


def clean_labels(runner: Runner, images: Float[Tensor, "b c h w"]) -> Int64[Tensor, " b"]:
    """F(x), no mask at all: the undefended answer."""

    def answer(start: int, size: int) -> Tensor:
        return torch.stack(_label_and_gap(runner.logits(images[start : start + size])))

    if not len(images):
        return torch.zeros(0, dtype=torch.int64, device=images.device)
    runner.refresh()
    fixed = runner.fixed(images)
    label, gap = torch.cat(runner.in_chunks(len(images), answer, fixed=fixed), dim=1)
    again = torch.nonzero(~decided(gap, runner.engine.tau))[:, 0]
    if runner.engine.precision != "fp32" and len(again):
        unsure = images[again]

        def decide(start: int, size: int) -> Tensor:
            logits = runner.logits(unsure[start : start + size], precision="fp32")
            return torch.stack(_label_and_gap(logits))

        fast = label[again], gap[again]
        sure = torch.cat(runner.in_chunks(len(again), decide, fixed=fixed), dim=1)
        runner.audit.add(*fast, *sure, tau=runner.engine.tau)
        label[again] = sure[0]
    return label.long()


def decided(gap: Float[Tensor, "*j"], tau: float) -> Bool[Tensor, "*j"]:
    """Does a fast label lead by enough? An infinite lead is an overflow, and no lead at all."""
    return (gap >= tau) & gap.isfinite()


def _label_and_gap(logits: Tensor) -> tuple[Tensor, Tensor]:
    label, gap = top_two(logits)
    return label.float(), gap  # labels below 2²⁴ are exact


@dataclass
class TwoMaskTable:
    """F(x_b ⊙ m0 ⊙ m1), cell by cell: a cell is evaluated when first asked for, once, and remembered.

    Cells are unions of masks (`MaskSet.unions`), so pairs that hide the same pixels share one. `labels`, when given,
    are the answers that `margin` is measured against; without them a margin is the gap to the runner-up. The images
    stay on their device; the table itself is kept on the CPU, where the next passes are planned.
    """

    runner: Runner
    images: Float[Tensor, "b c h w"]
    masks: MaskSet
    labels: Int64[Tensor, " b"] | None = None

    def __post_init__(self) -> None:
        if self.images.ndim != 4 or not self.images.is_floating_point():
            raise InputError(
                f"images must be floats in [0, 1] of shape (images, channels, height, width), not {self.images.dtype} "
                f"of {tuple(self.images.shape)}; `as_images` makes them from bytes"
            )
        if tuple(self.images.shape[-2:]) != self.masks.image_size:
            raise InputError(
                f"the images are {tuple(self.images.shape[-2:])}, the masks are for {self.masks.image_size}; "
                "resize the images, or build the threat and masks for their size"
            )
        self.runner.refresh()
        unions = self.masks.unions
        shape = len(self.images), len(unions)
        self.keep = self.masks.keep(self.images.device)
        self.first, self.second, self.of_pair = unions.first, unions.second, unions.of_pair
        self.known = torch.zeros(shape, dtype=torch.bool)
        self.label = torch.zeros(shape, dtype=torch.int64)
        self.gap = torch.zeros(shape, dtype=torch.float32)
        self.margin = torch.zeros(shape, dtype=torch.float32)
        self.forwards = torch.zeros(len(self.images), dtype=torch.int64)
        if self.labels is not None:
            self.against(self.labels)

    def against(self, labels: Int64[Tensor, " b"]) -> TwoMaskTable:
        """Measure margins against these labels from now on; what is known is kept.

        In a known cell that answers another label only the gap is left, and −gap bounds the margin from above.
        """
        if not (isinstance(labels, Tensor) and labels.shape == self.images.shape[:1] and labels.dtype == torch.int64):
            given = f"{labels.dtype} of {tuple(labels.shape)}" if isinstance(labels, Tensor) else type(labels).__name__
            raise InputError(
                f"labels must be a tensor of one int64 number for each of the {len(self.images)} images, not {given}"
            )
        self.labels = labels.cpu()
        self.range = label_range(self.labels)
        self.margin = torch.where(self.label == self.labels[:, None], self.gap, -self.gap)
        return self

    def evaluate(self, image: Int64[Tensor, " j"], union: Int64[Tensor, " j"]) -> None:
        """Make these cells known."""
        cells = torch.zeros_like(self.known)
        cells[image, union] = True  # each cell once, however often it was named
        image, union = torch.nonzero(cells & ~self.known, as_tuple=True)
        engine = self.runner.engine
        self._pass(image, union, precision=engine.precision)
        self.known[image, union] = True
        if engine.precision != "fp32":
            again = ~decided(self.gap[image, union], engine.tau)
            self._decide_again(image[again], union[again])

    def evaluate_all(self) -> None:
        """Make every cell known."""
        image, union = torch.nonzero(~self.known, as_tuple=True)
        self.evaluate(image, union)

    def _decide_again(self, image: Tensor, union: Tensor) -> None:
        """In float32; how far the fast gap was off is noted, and must not contradict τ."""
        fast = self.label[image, union], self.gap[image, union]
        self._pass(image, union, precision="fp32")
        self.runner.audit.add(*fast, self.label[image, union], self.gap[image, union], tau=self.runner.engine.tau)

    def _pass(self, image: Tensor, union: Tensor, *, precision: Precision) -> None:
        if not len(image):
            return
        there = None if self.labels is None else self.labels.to(self.images.device)

        def read(logits: Tensor, of_image: Tensor) -> Tensor:
            if there is None:
                label, gap = _label_and_gap(logits)
                return torch.stack([label, gap, gap], dim=1)
            require_classes(self.range, int(logits.shape[1]))
            return torch.stack([*_label_and_gap(logits), label_margin(logits, there[of_image])], dim=1)

        copies = Copies(image, self.first[union], self.second[union])
        answers = self.runner.evaluate(self.images, self.keep, copies, read, precision=precision).cpu()
        self.label[image, union] = answers[:, 0].long()
        self.gap[image, union] = answers[:, 1]
        self.margin[image, union] = answers[:, 2]
        self.forwards.index_add_(0, image, torch.ones_like(image))

    def labels_under(
        self, image: Int64[Tensor, " j"], mask: Int64[Tensor, " j"], *, until: Int64[Tensor, " j"] | None = None
    ) -> Int64[Tensor, "j n"]:
        """The second round of copy (image, mask): its label under every further mask.

        With `until`, a round is cancelled once a label differs from it: what was not evaluated repeats that label.
        """
        union = self.of_pair[mask]
        if until is None:
            self.evaluate(image.repeat_interleave(union.shape[1]), union.flatten())
            return self.label[image[:, None], union]
        self.survivors(image, union, until)
        seen = self.known[image[:, None], union]
        labels = self.label[image[:, None], union]
        other = (seen & (labels != until[:, None])).long().argmax(dim=1, keepdim=True)
        return torch.where(seen, labels, labels.gather(1, other))

    def survivors(
        self,
        image: Int64[Tensor, " j"],
        order: Int64[Tensor, "j u"],
        labels: Int64[Tensor, " j"],
        *,
        sure: bool = False,
    ) -> Bool[Tensor, " j"]:
        """Which rows of cells all answer their label (`sure`: by enough to answer so every time)? Looked at block by
        block in each row's own order, a row only until it fails.

        Blocks start small and double: most rows fail early or not at all. They depend on the row alone, so its cost
        does not change with the batch it came in; what is left of all rows is packed into whole chunks.
        """
        alive = torch.arange(len(image))
        start, block = 0, BLOCK
        while start < order.shape[1] and len(alive):
            union = order[alive, start : start + block]
            rows = image[alive]
            self.evaluate(rows.repeat_interleave(union.shape[1]), union.flatten())
            right = self._answers(rows[:, None], union, labels[alive][:, None], sure=sure).all(dim=1)
            alive = alive[right]
            start, block = start + block, 2 * block
        return torch.zeros(len(image), dtype=torch.bool).index_fill_(0, alive, True)

    def one_mask_labels(self) -> Int64[Tensor, "b n"]:
        """The first round: F(x_b ⊙ m) for every image and mask."""
        union = self.of_pair.diagonal().expand(len(self.images), -1)
        rows = torch.arange(len(self.images))
        self.evaluate(rows.repeat_interleave(union.shape[1]), union.flatten())
        return self.label[rows[:, None], union]

    def right(self) -> Bool[Tensor, "b unions"]:
        """Which known cells answer their image's label, and by enough to answer so every time?"""
        if self.labels is None:
            raise InputError("a certificate is about a label; give the table labels, or call against(labels)")
        rows, unions = torch.arange(len(self.images))[:, None], torch.arange(self.known.shape[1])[None]
        return self.known & self._answers(rows, unions, self.labels[:, None], sure=True)

    def _answers(self, image: Tensor, union: Tensor, label: Tensor, *, sure: bool) -> Bool[Tensor, "j u"]:
        same = self.label[image, union] == label
        if not sure:
            return same
        gap = self.gap[image, union]
        return same & (gap > 0) & decided(gap, self.runner.engine.tau_fp32)  # a tie is no lead, whatever τ


def two_mask_labels(
    classifier: Classifier, images: Float[Tensor, "b c h w"], masks: MaskSet, *, engine: Engine | None = None
) -> Int64[Tensor, "b n n"]:
    """The whole table F(x_b ⊙ m0 ⊙ m1): entry [b, 0, 0] is one mask alone, the table is symmetric."""
    table = TwoMaskTable(Runner(classifier, engine or Engine()), images, masks)
    table.evaluate_all()
    return table.label[:, table.of_pair].to(images.device)
