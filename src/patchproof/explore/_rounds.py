"""Double masking on one image, with everything it asked on the way to its answer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from patchproof.defenses import PatchCleanser, double_masking
from patchproof.defenses.patchcleanser import majority_label
from patchproof.masking import TwoMaskTable, clean_labels


@dataclass(frozen=True)
class SecondRound:
    """Copy `copy` of the first round said `label`, against the majority; `labels` is what it says under each further
    mask."""

    copy: int
    label: int
    labels: tuple[int, ...]

    @property
    def confirmed(self) -> bool:
        return set(self.labels) == {self.label}

    @property
    def against(self) -> int:
        return sum(label != self.label for label in self.labels)


@dataclass(frozen=True)
class Rounds:
    """Algorithm 1 on one image. `second` holds the disagreeing copies in the order they were asked: a confirmed one
    is the last, since it decides."""

    undefended: int
    first: tuple[int, ...]
    majority: int
    second: tuple[SecondRound, ...]
    answer: int

    @property
    def disagreeing(self) -> tuple[int, ...]:
        return tuple(copy for copy, label in enumerate(self.first) if label != self.majority)


def watch(defense: PatchCleanser, image: Float[Tensor, "c h w"]) -> Rounds:
    """The same `double_masking` as `defense.predict`, on whole second rounds, with each of them written down."""
    images = image[None]
    table = TwoMaskTable(defense.runner, images, defense.masks)
    first = table.one_mask_labels()
    asked: list[SecondRound] = []

    def second(row: Tensor, mask: Tensor) -> Int64[Tensor, "j n"]:
        labels = table.labels_under(row, mask)
        asked.append(SecondRound(int(mask[0]), int(first[0, mask[0]]), tuple(labels[0].tolist())))
        return labels

    answer = double_masking(first, second)
    undefended = clean_labels(defense.runner, images)
    ballot: list[int] = torch.flatten(first).tolist()
    return Rounds(int(undefended[0]), tuple(ballot), int(majority_label(first)[0]), tuple(asked), int(answer[0]))
