"""PatchCleanser (Xiang et al., USENIX Security 2022): double masking, and its certificate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from patchproof.defenses.base import Assessment, Certificates
from patchproof.geometry import MaskSet, PatchThreat
from patchproof.masking import Engine, Runner, TwoMaskTable
from patchproof.types import Classifier, InputError


def majority_label(labels: Int64[Tensor, "b n"]) -> Int64[Tensor, " b"]:
    """The most frequent label; among equals the smallest."""
    votes = (labels[:, :, None] == labels[:, None, :]).sum(dim=2)
    most = votes == votes.amax(dim=1, keepdim=True)
    return labels.masked_fill(~most, torch.iinfo(torch.int64).max).amin(dim=1)


def double_masking(
    first: Int64[Tensor, "b n"], second: Callable[[Tensor, Tensor], Int64[Tensor, "j n"]]
) -> Int64[Tensor, " b"]:
    """Algorithm 1: a disagreeing copy whose second round is unanimous wins, else the majority.

    `second(image, mask)` gives the labels of those one-mask copies under every further mask: a table look-up or a
    forward pass. It is asked about one copy an image at a time, in the order of the masks, until the image is decided.
    On a certified image every copy that hides the patch answers y. So if y disagrees, its own copy is unanimous; and a
    copy with another label meets y in its second round and never wins.
    """
    answer = majority_label(first)
    disagrees = first != answer[:, None]
    turn = disagrees.cumsum(dim=1)
    undecided = disagrees.any(dim=1)
    for current in range(1, int(turn.amax()) + 1 if turn.numel() else 1):
        image, mask = torch.nonzero(disagrees & (turn == current) & undecided[:, None], as_tuple=True)
        if not len(image):
            break
        own = first[image, mask]
        wins = (second(image, mask) == own[:, None]).all(dim=1)
        answer[image[wins]] = own[wins]
        undecided[image[wins]] = False
    return answer


@dataclass(frozen=True)
class PatchCleanser:
    """Certified(x, y) iff F(x ⊙ m0 ⊙ m1) = y for all m0, m1 ∈ 𝓜, where 𝓜 covers 𝓡."""

    classifier: Classifier
    masks: MaskSet
    threat: PatchThreat
    engine: Engine = field(default_factory=Engine, kw_only=True)
    exhaustive: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        if self.engine.precision != "fp32" and self.engine.tau == 0:
            raise InputError(
                f"{self.engine.precision} labels need a measured τ to count; "
                "take the engine that check_classifier returns"
            )
        missed = self.masks.uncovered(self.threat)
        if missed:
            raise InputError(
                f"masks do not cover the threat: {len(missed)} patch positions are hidden by no mask, "
                f"e.g. {next(iter(missed))}; build them with covering_masks(threat, per_axis=…)"
            )

    @cached_property
    def runner(self) -> Runner:
        """Remembers, from one batch to the next, the chunk that fits and what float32 had to decide again."""
        return Runner(self.classifier, self.engine)

    def predict(self, images: Float[Tensor, "b c h w"]) -> Int64[Tensor, " b"]:
        """Two rounds of masking (Algorithm 1); the second only where the first disagrees, and only until decided."""
        table = self._table(images)
        return _defended(table, table.one_mask_labels()).to(images.device)

    def certify(self, images: Float[Tensor, "b c h w"], labels: Int64[Tensor, " b"]) -> Certificates:
        """∀ m0, m1 ∈ 𝓜: F(x ⊙ m0 ⊙ m1) = y (Algorithm 2), giving up on an image at its first wrong label."""
        return self._certify(self._table(images, labels), labels.cpu()).to(images.device)

    def assess(self, images: Float[Tensor, "b c h w"], labels: Int64[Tensor, " b"] | None = None) -> Assessment:
        """Predict and certify from one table, so that no copy is evaluated for both.

        Without labels the certificate is about the prediction: no patch on this very image changes the answer.
        """
        table = self._table(images, labels)
        first = table.one_mask_labels()
        unanimous = (first == first[:, :1]).all(dim=1)
        predictions = _defended(table, first)
        about = predictions if labels is None else labels.cpu()
        certificates = self._certify(table if labels is not None else table.against(about), about)
        return Assessment(predictions, about, certificates, unanimous).to(images.device)

    def _table(self, images: Tensor, labels: Tensor | None = None) -> TwoMaskTable:
        return TwoMaskTable(self.runner, images, self.masks, labels)

    def _certify(self, table: TwoMaskTable, labels: Int64[Tensor, " b"]) -> Certificates:
        if self.exhaustive:
            table.evaluate_all()
            return _certificates(table, table.right().all(dim=1))
        images = torch.arange(len(table.images))
        order = self._one_mask_order(table).expand(len(images), -1)
        alive = images[table.survivors(images, order, labels, sure=True)]
        alive = alive[table.survivors(alive, two_mask_order(table, alive), labels[alive], sure=True)]
        return _certificates(table, torch.zeros(len(images), dtype=torch.bool).index_fill_(0, alive, True))

    def _one_mask_order(self, table: TwoMaskTable) -> Int64[Tensor, " n"]:
        """Central masks first: they hide the object more often than those at the rim."""
        height, width = self.masks.image_size
        offset = [
            abs(r.top + r.bottom - height) / height + abs(r.left + r.right - width) / width for r in self.masks.rects
        ]
        return table.of_pair.diagonal()[torch.tensor(offset).argsort(stable=True)]


def _defended(table: TwoMaskTable, first: Int64[Tensor, "b n"]) -> Int64[Tensor, " b"]:
    """Algorithm 1 on a table that is filled as it goes."""

    def second(image: Tensor, mask: Tensor) -> Int64[Tensor, "j n"]:
        return table.labels_under(image, mask, until=first[image, mask])

    return double_masking(first, second)


def two_mask_order(table: TwoMaskTable, images: Int64[Tensor, " a"]) -> Int64[Tensor, "a u"]:
    """The two-mask cells of each image, those most likely to fail first: the smallest sum of one-mask margins."""
    unions = torch.nonzero(table.first != table.second)[:, 0]
    one_mask = table.margin[images][:, table.of_pair.diagonal()]
    hardest = (one_mask[:, table.first[unions]] + one_mask[:, table.second[unions]]).argsort(dim=1, stable=True)
    return unions[hardest]


def _certificates(table: TwoMaskTable, certified: Bool[Tensor, " b"]) -> Certificates:
    """Read margin and witness off the known cells: the failing cell of least margin, else the weakest one."""
    rows = torch.arange(len(table.images))
    failing = table.known & ~table.right()
    candidates = torch.where(failing.any(dim=1, keepdim=True), failing, table.known)
    weakest = table.margin.masked_fill(~candidates, torch.inf).argmin(dim=1)
    return Certificates(
        certified=certified,
        margin=table.margin[rows, weakest],
        forwards=table.forwards.clone(),
        witness=torch.stack([table.first[weakest], table.second[weakest]], dim=1),
        witness_label=table.label[rows, weakest],
    )
