"""What a defence makes of one image: its answer, its certificate, and the masked copies behind them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from patchproof.defenses import MaskTable, PatchCleanser, assess, double_masking
from patchproof.defenses.patchcleanser import majority_label
from patchproof.masking import Evaluator

Cell = tuple[int, int]


@dataclass(frozen=True, eq=False)
class CopyTable:
    """Label and margin of every masked copy: cell [a, b] is the copy under masks a and b.

    A defence of one round has a single row. `right`: the copy answers the image's label by at least τ.
    """

    labels: Int64[Tensor, "rows n"]
    margins: Float[Tensor, "rows n"]
    right: Bool[Tensor, "rows n"]

    @classmethod
    def of(cls, table: MaskTable, cells: Int64[Tensor, "rows n"]) -> CopyTable:
        """Of the table's only image, every cell evaluated, none given up early."""
        table.evaluate_all()
        return cls(table.label[0, cells], table.margin[0, cells], table.right()[0, cells])

    def masks(self, cell: Cell) -> tuple[int, ...]:
        return tuple(sorted(set(cell))) if len(self.labels) > 1 else cell[1:]

    def count(self, copies: Bool[Tensor, "rows n"]) -> int:
        """How many copies, the two orders of a pair counted once."""
        return int(torch.triu(copies).sum())

    @property
    def weakest(self) -> Cell:
        """The failing cell of least margin; where none fails, the cell of least margin."""
        candidates = self.right if bool(self.right.all()) else ~self.right
        margins = self.margins.nan_to_num(-torch.inf).masked_fill(~candidates, torch.inf)
        first, second = divmod(int(margins.argmin()), margins.shape[1])
        return first, second


@dataclass(frozen=True, eq=False)
class Finding:
    """What is proved of a clean image about `label`; a defence without masks has no copies to show."""

    label: int
    answer: int
    certified: bool
    margin: float
    copies: CopyTable | None = None


@dataclass(frozen=True)
class SecondRound:
    """Copy `copy` of the first round answered `label`, against the majority, and `labels` under each further mask."""

    copy: int
    label: int
    labels: tuple[int, ...]

    @property
    def confirmed(self) -> bool:
        return set(self.labels) == {self.label}


@dataclass(frozen=True)
class Rounds:
    """How an answer came about: the one-mask labels, if there are masks; for double masking the second rounds, in the
    order they were asked. A confirmed one is the last, since it decides."""

    undefended: int | None
    answer: int
    first: tuple[int, ...] = ()
    majority: int = -1
    second: tuple[SecondRound, ...] | None = None

    @property
    def disagreeing(self) -> int:
        return sum(label != self.majority for label in self.first)


def study(
    defense: Any, evaluator: Evaluator | None, image: Float[Tensor, "c h w"], label: int | None = None
) -> Finding:
    """Without a label, the finding is about the defence's own answer, and where that is an alarm, the classifier's."""
    images, copies = image[None], None
    about = None if label is None else torch.tensor([label], device=image.device)
    if isinstance(defense, PatchCleanser):
        about = defense.predict(images) if about is None else about
        pairs = defense.pairs(images, about)
        copies = CopyTable.of(pairs.table, pairs.of_pair)
        answer, certified = pairs.defended(pairs.one_mask_labels()), pairs.all_right(defense.central_first())
        return Finding(int(about), int(answer), bool(certified), float(copies.margins[copies.weakest]), copies)
    found = assess(defense, images, about)
    about = found.predictions if about is None else about
    if evaluator is not None and int(about) < 0:
        about = evaluator.labels(images)
    table = one_mask_table(defense, evaluator, images, about)
    copies = None if table is None else CopyTable.of(table, table.first[None])
    proof = found.certificates
    return Finding(int(about), int(found.predictions), bool(proof.certified), float(proof.margin), copies)


def watch(defense: Any, evaluator: Evaluator | None, image: Float[Tensor, "c h w"]) -> Rounds:
    """The answer of `defense.predict`; of double masking also each second round, every label of it."""
    images, asked = image[None], list[SecondRound]()
    undefended = None if evaluator is None else int(evaluator.labels(images))
    if not isinstance(defense, PatchCleanser):
        answer, table = int(defense.predict(images)), one_mask_table(defense, evaluator, images)
        if table is None:
            return Rounds(undefended, answer)
        labels = table.row(table.first)
        return Rounds(undefended, answer, tuple(labels[0].tolist()), int(majority_label(labels)))
    pairs = defense.pairs(images)
    first = pairs.one_mask_labels()

    def second(row: Tensor, mask: Tensor) -> Int64[Tensor, "j n"]:
        labels = pairs.second_round(row, mask)
        asked.append(SecondRound(int(mask), int(first[0, mask]), tuple(labels[0].tolist())))
        return labels

    answer = int(double_masking(first, second))
    return Rounds(undefended, answer, tuple(first[0].tolist()), int(majority_label(first)), tuple(asked))


def one_mask_table(
    defense: Any, evaluator: Evaluator | None, images: Float[Tensor, "1 c h w"], labels: Tensor | None = None
) -> MaskTable | None:
    """The one-mask copies of a defence that has masks and a classifier."""
    masks = getattr(defense, "masks", None)
    if masks is None or evaluator is None:
        return None
    every = torch.arange(len(masks))
    return MaskTable(evaluator, images, masks.keep(images.device), every, every, labels)
