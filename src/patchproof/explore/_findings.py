"""The answer and the certificate of a defence for one image, the masked copies behind them, and sentences about both.

`name` gives the name of a label; the label −1 is an alarm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from patchproof.defenses import MaskTable, PatchCleanser, assess, double_masking
from patchproof.defenses.patchcleanser import majority_label
from patchproof.geometry import size_words
from patchproof.masking import Evaluator
from patchproof.runs import Record

Cell = tuple[int, int]
Name = Callable[[int], str]

MOST_NAMED = 4
"""Most copies that a sentence lists; more are counted."""


@dataclass(frozen=True, eq=False)
class CopyTable:
    """Label and margin of every masked copy: cell [a, b] is the copy under masks a and b.

    A defence of one round has a single row. `right` is True if the copy has the image's label with a margin of at least
    τ.
    """

    labels: Int64[Tensor, "rows n"]
    margins: Float[Tensor, "rows n"]
    right: Bool[Tensor, "rows n"]

    @classmethod
    def of(cls, table: MaskTable, cells: Int64[Tensor, "rows n"]) -> CopyTable:
        """Evaluate every cell of a table of one image."""
        table.evaluate_all()
        return cls(table.label[0, cells], table.margin[0, cells], table.right()[0, cells])

    def masks(self, cell: Cell) -> tuple[int, ...]:
        return tuple(sorted(set(cell))) if len(self.labels) > 1 else cell[1:]

    def count(self, copies: Bool[Tensor, "rows n"]) -> int:
        """Number of copies; the two orders of a pair count once."""
        return int(torch.triu(copies).sum())

    @property
    def weakest(self) -> Cell:
        """The cell with the smallest margin among the cells that fail, or among all if none fails."""
        candidates = self.right if bool(self.right.all()) else ~self.right
        margins = self.margins.nan_to_num(-torch.inf).masked_fill(~candidates, torch.inf)
        first, second = divmod(int(margins.argmin()), margins.shape[1])
        return first, second


@dataclass(frozen=True, eq=False)
class Finding:
    """The certificate of a clean image for `label`; a defence without masks has no copies to show."""

    label: int
    answer: int
    certified: bool
    margin: float
    copies: CopyTable | None = None


@dataclass(frozen=True)
class Rounds:
    """The steps to an answer: the one-mask labels, if there are masks, and for double masking the second round: each
    disagreeing copy, in the order of evaluation -> its labels under every further mask."""

    undefended: int | None
    answer: int
    first: tuple[int, ...] = ()
    majority: int = -1
    second: Mapping[int, tuple[int, ...]] | None = None

    @property
    def disagreeing(self) -> int:
        return sum(label != self.majority for label in self.first)

    @property
    def confirmed(self) -> int | None:
        """The copy that decides, because its second round agrees with it unanimously; it is the last one evaluated."""
        return next((copy for copy, said in (self.second or {}).items() if set(said) == {self.first[copy]}), None)


def study(
    defense: Any, evaluator: Evaluator | None, image: Float[Tensor, "c h w"], label: int | None = None
) -> Finding:
    """Certify one image for its label, or else for the defence's answer, or if that is an alarm, the classifier's."""
    images = image[None]
    about = None if label is None else torch.tensor([label], device=image.device)
    if isinstance(defense, PatchCleanser):
        about = defense.predict(images) if about is None else about
        pairs = defense.pairs(images, about)
        copies = CopyTable.of(pairs, pairs.of_pair)
        answer, certified = pairs.defended(pairs.one_mask_labels()), pairs.all_right()
        return Finding(int(about), int(answer), bool(certified), float(copies.margins[copies.weakest]), copies)
    found = assess(defense, images, about)
    about = found.predictions if about is None else about
    if evaluator is not None and int(about) < 0:
        about = evaluator.labels(images)
    table = one_mask_table(defense, evaluator, images, about)
    shown = None if table is None else CopyTable.of(table, table.first[None])
    proof = found.certificates
    return Finding(int(about), int(found.predictions), bool(proof.certified), float(proof.margin), shown)


def watch(defense: Any, evaluator: Evaluator | None, image: Float[Tensor, "c h w"]) -> Rounds:
    """Predict one image, and record the one-mask labels and all labels of the second round behind the answer."""
    images, asked = image[None], dict[int, tuple[int, ...]]()
    undefended = None if evaluator is None else int(evaluator.labels(images))
    if not isinstance(defense, PatchCleanser):
        answer, table = int(defense.predict(images)), one_mask_table(defense, evaluator, images)
        if table is None:
            return Rounds(undefended, answer)
        labels = table.one_mask_labels()
        return Rounds(undefended, answer, tuple(labels[0].tolist()), int(majority_label(labels)))
    pairs = defense.pairs(images)
    first = pairs.one_mask_labels()

    def second(row: Tensor, mask: Tensor) -> Int64[Tensor, "j n"]:
        labels = pairs.second_round(row, mask)
        for copy, found in zip(mask.tolist(), labels.tolist(), strict=True):
            asked[copy] = tuple(found)
            if set(found) == {int(first[0, copy])}:  # this copy decides, so the others do not matter
                break
        return labels

    answer = int(double_masking(first, second))
    return Rounds(undefended, answer, tuple(first[0].tolist()), int(majority_label(first)), asked)


def one_mask_table(
    defense: Any, evaluator: Evaluator | None, images: Float[Tensor, "1 c h w"], labels: Tensor | None = None
) -> MaskTable | None:
    """The table of one-mask copies; None for a defence without masks or without a classifier."""
    masks = getattr(defense, "masks", None)
    return None if masks is None or evaluator is None else MaskTable(evaluator, images, masks, labels)


def mask_words(masks: Sequence[int]) -> str:
    """`mask 3`, or `masks 3 and 5`, counted from 1."""
    numbers = " and ".join(str(mask + 1) for mask in masks)
    return f"masks {numbers}" if len(masks) > 1 else f"mask {numbers}"


def verdict(finding: Finding, name: Name, defense: Any) -> str:
    """Certified or not, the masked copy that decides it, and what follows for a patch."""
    size, right, copies = size_words(*defense.threat.patch_sizes), name(finding.label), finding.copies
    opening, detects = "Certified" if finding.certified else "Not certified", defense.guarantee == "detection"
    patch, some = f"{size} patch", f"A {size} patch"
    if defense.threat.patches == 2:
        patch, some = f"two {size} patches", f"Two {size} patches"
    if not finding.certified and finding.answer not in (finding.label, -1):
        follows = "The answer is wrong even without a patch."
    elif not finding.certified:
        follows = f"{some} may be able to change the answer{' without an alarm' if detects else ''}."
    elif detects:
        follows = f"Under any {patch}, anywhere on this image, the answer is {right} or an alarm."
    else:
        follows = f"No {patch}, anywhere on this image, can change the answer."
    if copies is None:
        said = f"margin {finding.margin:+.3g}; the defence answers {name(finding.answer)}"
        return f"{opening} as {right}, {said}. {follows}"
    kind = "pairs of masks" if len(copies.labels) > 1 else "masks"
    failing, count = copies.count(~copies.right), copies.count(copies.right | True)
    label, margin = int(copies.labels[copies.weakest]), float(copies.margins[copies.weakest])
    which = mask_words(copies.masks(copies.weakest))
    found = f"all {count} {kind} say {right}, the closest ({which}) by {margin:.3g}"
    if failing:
        example = f"leads by only {margin:.3g}" if label == finding.label else f"is {name(label)}"
        verb = "does" if failing == 1 else "do"
        found = f"{failing} of {count} {kind} {verb} not say {right} clearly enough, e.g. under {which} it {example}"
    alarm = " On the clean image the defence raises an alarm." if finding.answer < 0 else ""
    return f"{opening}: {found}. {follows}{alarm}"


def record_words(record: Record, name: Name) -> str:
    """The run's record of this image as a sentence."""
    if record.certified is None:
        return ""
    words = ["certified" if record.certified else "not certified"]
    if record.margin is not None:
        looked = "" if record.certified else " as far as the run looked"
        words.append(f"margin {record.margin:+.3g}{looked}")
    for kind, right in {"undefended": record.undefended, "defended": record.defended}.items():
        if right is not None:
            words.append(f"{kind} {'right' if right else 'wrong'}")
    return f"The run's record: {', '.join(words)}; labelled {name(record.label)}."


def explain(rounds: Rounds, name: Name) -> str:
    """The steps to the answer of the defence as a sentence."""
    answer, count = f"the answer is {name(rounds.answer)}", len(rounds.first)
    if not count:
        return f"The answer is {name(rounds.answer)}."
    if not rounds.disagreeing:
        no_more = "" if rounds.second is None else ", so there is no second round"
        return f"All {count} copies say {name(rounds.majority)}{no_more}: {answer}."
    first = f"{count - rounds.disagreeing} of {count} copies say {name(rounds.majority)}"
    if rounds.second is None:
        return f"{first}, {rounds.disagreeing} something else: {answer}."
    copies = {copy: f"{copy + 1} ({name(rounds.first[copy])})" for copy in rounds.second}
    lost = [words for copy, words in copies.items() if copy != rounds.confirmed]
    parts = [first]
    if len(lost) == 1:
        parts.append(f"copy {lost[0]} is contradicted by its second round")
    elif lost:
        which = f"copies {', '.join(lost)}" if len(lost) <= MOST_NAMED else f"{len(lost)} others"
        parts.append(f"{which} are each contradicted by their second round")
    if rounds.confirmed is None:
        return f"{'; '.join(parts)}: {answer}, the majority’s."
    return f"{'; '.join(parts)}; copy {copies[rounds.confirmed]} is confirmed by its second round: {answer}."


def meaning(rounds: Rounds, finding: Finding, name: Name, guarantee: str) -> str:
    """The answer under the patch, compared with what was proved about the clean image."""
    alone = "" if rounds.undefended is None else f"Without the defence the answer would be {name(rounds.undefended)}. "
    right, alarm = name(finding.label), rounds.answer < 0
    if rounds.answer == finding.label or (alarm and guarantee == "detection"):
        answer = "there is an alarm" if alarm else f"the answer is {right}"
        promise = "as the certificate promises" if finding.certified else "though nothing was promised for this image"
        return f"{alone}With it {answer}, {promise}."
    if not finding.certified:
        return f"{alone}With it the answer is not {right}: this image is not certified."
    return (
        f"{alone}With it the answer is not {right} although this image is certified. That must not happen: the "
        "classifier answered the same masked image differently. Please report it."
    )
