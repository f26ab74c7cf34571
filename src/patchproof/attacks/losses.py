"""What an attack climbs: losses over the masked copies that show the patch, one for each way a defence can fail."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.nn import functional

from patchproof.attacks.places import mass_inside
from patchproof.attacks.views import Aim, Views
from patchproof.masking import label_margin
from patchproof.types import require_one_of

Loss = Literal["cross-entropy", "margin"]

ENOUGH = 1.0
"""A copy whose wrong label leads by this much pulls no more; the effort goes to the copies that still resist."""


@dataclass(frozen=True)
class Scene:
    """What the attacker knows of the clean images: `logits[b, u]` is what view u of image b answers."""

    views: Views
    labels: Int64[Tensor, " b"]
    logits: Float[Tensor, "b u classes"]

    def __getitem__(self, rows: Tensor) -> Scene:
        return Scene(self.views, self.labels[rows], self.logits[rows])

    @property
    def right(self) -> Bool[Tensor, "b n n"]:
        """Which two-mask copies of the clean image answer the label?"""
        return (self.logits.argmax(dim=2) == self.labels[:, None])[:, self.views.of_pair]

    def row(self, mask: int) -> Float[Tensor, "b n classes"]:
        """The second round under one first mask."""
        return self.logits[:, self.views.of_pair[mask]]

    def shows(self, places: Int64[Tensor, "b 4"]) -> Bool[Tensor, "b u"]:
        """Which views show part of the patch?"""
        every = torch.arange(len(self.views.first), device=self.views.first.device)
        pixels = self.views.shown(every)[:, 0].float()
        return mass_inside(pixels, places).T > 0.5


class Objective(ABC):
    """A way to fail: which copies have to change, a loss over them, and the places where that can work at all."""

    needs_masks: bool = True

    @abstractmethod
    def aim(self, scene: Scene, places: Int64[Tensor, "b 4"], attempt: Int64[Tensor, " b"]) -> Aim:
        """The copies to change in each image with a patch at this place; later attempts may choose others."""

    @abstractmethod
    def loss(self, logits: Float[Tensor, "j k classes"], labels: Int64[Tensor, " j"], aim: Aim) -> Float[Tensor, " j"]:
        """Larger is worse for the defender."""

    def promising(self, scene: Scene, hides: Bool[Tensor, "p n"]) -> Bool[Tensor, "b p"]:
        """Places where the clean image's answers leave this failure open; they are tried first, not alone."""
        return torch.ones(len(scene.labels), len(hides), dtype=torch.bool, device=hides.device)


@dataclass(frozen=True)
class Misclassify(Objective):
    """F(x′) ≠ y: the undefended classifier, seen without masks."""

    kind: Loss = "cross-entropy"
    needs_masks = False

    def __post_init__(self) -> None:
        require_one_of("the loss", self.kind, get_args(Loss))

    def aim(self, scene: Scene, places: Int64[Tensor, "b 4"], attempt: Int64[Tensor, " b"]) -> Aim:
        view = torch.full((len(places), 1), scene.views.whole, device=places.device)
        return Aim(view, torch.ones_like(view, dtype=torch.bool), scene.labels)

    def loss(self, logits: Float[Tensor, "j k classes"], labels: Int64[Tensor, " j"], aim: Aim) -> Float[Tensor, " j"]:
        if self.kind == "margin":
            return -label_margin(logits, labels)[:, 0]
        return functional.cross_entropy(logits[:, 0], labels, reduction="none")


@dataclass(frozen=True)
class WrongMajority(Objective):
    """Most one-mask copies agree on a wrong label, and no copy is left whose second round is unanimous for y.

    Slots 0…n−1 are the one-mask copies, slots n…2n−1 the weakest copy in the second round of each: a row that cannot
    be made to vote for the wrong label must at least not be confirmed.
    """

    def aim(self, scene: Scene, places: Int64[Tensor, "b 4"], attempt: Int64[Tensor, " b"]) -> Aim:
        views, shows = scene.views, scene.shows(places)
        rows = views.one_mask.expand(len(places), -1)
        margin = label_margin(scene.logits, scene.labels)[:, views.of_pair]
        partner = margin.masked_fill(~shows[:, views.of_pair], torch.inf).argmin(dim=2)
        second = views.of_pair[torch.arange(rows.shape[1], device=partner.device), partner]
        view = torch.cat([rows, second], dim=1)
        return Aim(view, shows.gather(1, view), scene.labels)

    def loss(self, logits: Float[Tensor, "j k classes"], labels: Int64[Tensor, " j"], aim: Aim) -> Float[Tensor, " j"]:
        n = logits.shape[1] // 2
        first, used = logits[:, :n], aim.used[:, :n]
        wrong = strongest_wrong(_mean(first, used[:, :, None]), labels)
        votes = label_margin(first, wrong).clamp(max=ENOUGH)
        against = -label_margin(logits, labels)
        unconfirmed = torch.maximum(against[:, :n], against[:, n:]).clamp(max=ENOUGH)
        return _mean(votes, used) + _mean(unconfirmed, aim.used[:, n:])

    def promising(self, scene: Scene, hides: Bool[Tensor, "p n"]) -> Bool[Tensor, "b p"]:
        """No mask that hides the place has a second round unanimous for y."""
        confirmed = scene.right.all(dim=2)
        return (confirmed.float() @ hides.float().T) < 0.5


@dataclass(frozen=True)
class FakeUnanimity(Objective):
    """All copies under one first mask agree on one wrong label, so that this copy wins as a unanimous disagreer.

    In its second round the masks that hide the patch answer as on the clean image. So rows where those answers already
    agree on a wrong label come first, then those that lean most to one; attempt a takes the a-th best row.
    """

    def aim(self, scene: Scene, places: Int64[Tensor, "b 4"], attempt: Int64[Tensor, " b"]) -> Aim:
        of_pair = scene.views.of_pair
        shows = scene.shows(places)[:, of_pair]
        rows = [self._consider(scene.row(m), scene.labels, shows[:, m], m) for m in range(len(of_pair))]
        wrong, burden = (torch.stack(values, dim=1) for values in zip(*rows, strict=True))
        every = torch.arange(len(places), device=places.device)
        row = burden.argsort(dim=1, stable=True)[every, attempt % len(of_pair)]
        return Aim(of_pair[row], shows[every, row], wrong[every, row])

    def _consider(
        self, row: Float[Tensor, "b n classes"], labels: Int64[Tensor, " b"], shows: Bool[Tensor, "b n"], mask: int
    ) -> tuple[Int64[Tensor, " b"], Float[Tensor, " b"]]:
        """The wrong label that a row's hidden copies answer, or else that its copies lean to; and what speaks against
        the row: hidden copies that answer otherwise, then little leaning. A row that hides the patch comes last."""
        hidden = ~shows
        pull = torch.where(hidden.any(dim=1, keepdim=True), hidden, shows)
        wrong = strongest_wrong(_mean(row, pull[:, :, None]), labels)
        hopeless = (hidden & (row.argmax(dim=2) != wrong[:, None])).sum(dim=1)
        leaning = _mean(label_margin(row, wrong), shows)
        return wrong, hopeless + len(hidden[0]) * hidden[:, mask] - torch.sigmoid(leaning)

    def loss(self, logits: Float[Tensor, "j k classes"], labels: Int64[Tensor, " j"], aim: Aim) -> Float[Tensor, " j"]:
        leads = label_margin(logits, aim.wrong).clamp(max=ENOUGH)
        weakest = leads.masked_fill(~aim.used, ENOUGH).amin(dim=1)
        return _mean(leads, aim.used) + weakest

    def promising(self, scene: Scene, hides: Bool[Tensor, "p n"]) -> Bool[Tensor, "b p"]:
        """Some row that shows the place has no right answer under the masks that hide it."""
        in_the_way = [rows.float() @ hides.float().T for rows in scene.right]  # [m, p]: right answers of row m
        open_rows = [(count < 0.5) & ~hides.T for count in in_the_way]
        return torch.stack([rows.any(dim=0) for rows in open_rows])


def strongest_wrong(logits: Float[Tensor, "j classes"], labels: Int64[Tensor, " j"]) -> Int64[Tensor, " j"]:
    """The label other than the right one with the largest logit."""
    return logits.detach().scatter(1, labels[:, None], -torch.inf).argmax(dim=1)


def _mean(values: Tensor, used: Tensor) -> Tensor:
    """The mean over the used copies, 0 if there are none."""
    used = used.expand_as(values)
    return values.masked_fill(~used, 0).sum(dim=1) / used.sum(dim=1).clamp(min=1)
