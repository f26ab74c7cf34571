"""What an attack climbs: losses over the masked copies that show the patch, one for each way a defence can fail."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.nn import functional

from patchproof.attacks.places import mass_inside
from patchproof.attacks.views import Aim, Views

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
    def table(self) -> Float[Tensor, "b n n classes"]:
        return self.logits[:, self.views.of_pair]

    @property
    def right(self) -> Bool[Tensor, "b n n"]:
        """Which two-mask copies of the clean image answer the label?"""
        return self.table.argmax(dim=3) == self.labels[:, None, None]

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
        return torch.ones(len(scene.labels), len(hides), dtype=torch.bool, device=scene.labels.device)


@dataclass(frozen=True)
class Misclassify(Objective):
    """F(x′) ≠ y: the undefended classifier, seen without masks."""

    kind: Literal["cross-entropy", "margin"] = "cross-entropy"
    needs_masks = False

    def aim(self, scene: Scene, places: Int64[Tensor, "b 4"], attempt: Int64[Tensor, " b"]) -> Aim:
        view = torch.full((len(places), 1), scene.views.whole, device=places.device)
        return Aim(view, torch.ones_like(view, dtype=torch.bool), scene.labels)

    def loss(self, logits: Float[Tensor, "j k classes"], labels: Int64[Tensor, " j"], aim: Aim) -> Float[Tensor, " j"]:
        if self.kind == "margin":
            return -lead(logits, labels)[:, 0]
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
        margin = lead(scene.table.flatten(1, 2), scene.labels).unflatten(1, views.of_pair.shape)
        partner = margin.masked_fill(~shows[:, views.of_pair], torch.inf).argmin(dim=2)
        second = views.of_pair[torch.arange(rows.shape[1], device=partner.device), partner]
        view = torch.cat([rows, second], dim=1)
        return Aim(view, shows.gather(1, view), scene.labels)

    def loss(self, logits: Float[Tensor, "j k classes"], labels: Int64[Tensor, " j"], aim: Aim) -> Float[Tensor, " j"]:
        n = logits.shape[1] // 2
        first, used = logits[:, :n], aim.used[:, :n]
        wrong = strongest_wrong(_mean(first, used[:, :, None]), labels)
        votes = lead(first, wrong).clamp(max=ENOUGH)
        against = -lead(logits, labels)
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
        views, shows = scene.views, scene.shows(places)[:, scene.views.of_pair]
        wrong = self._wrong_labels(scene, shows)
        every = torch.arange(len(places), device=places.device)
        row = self._ranked_rows(scene, shows, wrong)[every, attempt % wrong.shape[1]]
        return Aim(views.of_pair[row], shows[every, row], wrong[every, row])

    def _wrong_labels(self, scene: Scene, shows: Bool[Tensor, "b n n"]) -> Int64[Tensor, "b n"]:
        """For each row the wrong label its hidden copies answer, or else the one its copies lean to most."""
        hidden = ~shows
        pull = torch.where(hidden.any(dim=2, keepdim=True), hidden, shows)
        return strongest_wrong(_mean(scene.table, pull[..., None], dim=2), scene.labels[:, None])

    def _ranked_rows(
        self, scene: Scene, shows: Bool[Tensor, "b n n"], wrong: Int64[Tensor, "b n"]
    ) -> Int64[Tensor, "b n"]:
        answers = scene.table.argmax(dim=3)
        hopeless = (~shows & (answers != wrong[:, :, None])).sum(dim=2)
        leaning = _mean(lead(scene.table, wrong), shows, dim=2)
        unseen = ~shows.diagonal(dim1=1, dim2=2)
        burden = hopeless + len(scene.views.of_pair) * unseen - torch.sigmoid(leaning)
        return burden.argsort(dim=1, stable=True)

    def loss(self, logits: Float[Tensor, "j k classes"], labels: Int64[Tensor, " j"], aim: Aim) -> Float[Tensor, " j"]:
        leads = lead(logits, aim.wrong).clamp(max=ENOUGH)
        weakest = leads.masked_fill(~aim.used, ENOUGH).amin(dim=1)
        return _mean(leads, aim.used) + weakest

    def promising(self, scene: Scene, hides: Bool[Tensor, "p n"]) -> Bool[Tensor, "b p"]:
        """Some row that shows the place has no right answer under the masks that hide it."""
        in_the_way = [row.float() @ hides.float().T for row in scene.right]  # [m, p]: right answers of row m
        open_rows = [(count < 0.5) & ~hides.T for count in in_the_way]
        return torch.stack([rows.any(dim=0) for rows in open_rows])


def lead(logits: Float[Tensor, "j *k classes"], labels: Int64[Tensor, " j *l"]) -> Float[Tensor, " j *k"]:
    """Logit of the label minus the largest other one; one label an image, or one a row of copies."""
    index = labels.reshape(*labels.shape, *[1] * (logits.ndim - labels.ndim)).expand(*logits.shape[:-1], 1)
    rest = logits.scatter(-1, index, -torch.inf).amax(dim=-1)
    return logits.gather(-1, index)[..., 0] - rest


def strongest_wrong(logits: Float[Tensor, "j *k classes"], labels: Int64[Tensor, " j *#k"]) -> Int64[Tensor, " j *k"]:
    """The label other than the right one with the largest logit."""
    index = labels[..., None].expand(*logits.shape[:-1], 1)
    return logits.detach().scatter(-1, index, -torch.inf).argmax(dim=-1)


def _mean(values: Tensor, used: Tensor, dim: int = 1) -> Tensor:
    """The mean over the used ones, 0 if there are none."""
    used = used.expand_as(values)
    return values.masked_fill(~used, 0).sum(dim=dim) / used.sum(dim=dim).clamp(min=1)
