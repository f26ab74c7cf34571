"""Ways in which a defence can fail, as losses over the masked copies that show the patch (see `masking.Objective`)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from patchproof.geometry import Fields, MaskSet
from patchproof.masking import Aim, CleanAnswers, Objective, Views, label_margin
from patchproof.types import Size

ENOUGH = 1.0
"""Margins of a wrong label count up to this value, so that the effort goes to the copies that still resist."""


@dataclass(frozen=True)
class PairObjective(Objective):
    """Base class for attacks on all two-mask predictions; `of_pair(device)[a, b]` is the view of masks a and b."""

    masks: MaskSet

    def views(self, image_size: Size, device: torch.device) -> Views:
        return Views.of(self.masks.keep(device), self.masks.unions.first, self.masks.unions.second)

    def of_pair(self, device: torch.device) -> Int64[Tensor, "n n"]:
        return self.masks.unions.of_pair.to(device)

    def salient_views(self, views: Views) -> Int64[Tensor, " v"]:
        """The one-mask copies, which are the first round."""
        return self.of_pair(views.first.device).diagonal()

    def right(self, clean: CleanAnswers) -> Bool[Tensor, "b n n"]:
        """True for each two-mask copy of the clean image that is predicted as the label."""
        return (clean.logits.argmax(dim=2) == clean.labels[:, None])[:, self.of_pair(clean.labels.device)]


@dataclass(frozen=True)
class WrongMajority(PairObjective):
    """Most one-mask copies agree on a wrong label, and no second round is unanimous for y.

    Slots 0…n−1 are the one-mask copies; slots n…2n−1 are the weakest copy in the second round of each, because a copy
    that keeps the label y in the first round must at least not be confirmed by its second round.
    """

    def aim(self, clean: CleanAnswers, places: Int64[Tensor, "b *k 4"], attempt: Int64[Tensor, " b"]) -> Aim:
        of_pair, shows = self.of_pair(places.device), clean.shows(places)
        rows = of_pair.diagonal().expand(len(places), -1)
        margin = label_margin(clean.logits, clean.labels)[:, of_pair]
        partner = margin.masked_fill(~shows[:, of_pair], torch.inf).argmin(dim=2)
        second = of_pair[torch.arange(rows.shape[1], device=partner.device), partner]
        view = torch.cat([rows, second], dim=1)
        return Aim(view, shows.gather(1, view), clean.labels)

    def loss(self, logits: Float[Tensor, "j k classes"], labels: Int64[Tensor, " j"], aim: Aim) -> Float[Tensor, " j"]:
        n = logits.shape[1] // 2
        first, used = logits[:, :n], aim.used[:, :n]
        wrong = strongest_wrong(_mean(first, used[:, :, None]), labels)
        votes = label_margin(first, wrong).clamp(max=ENOUGH)
        against = -label_margin(logits, labels)
        unconfirmed = torch.maximum(against[:, :n], against[:, n:]).clamp(max=ENOUGH)
        return _mean(votes, used) + _mean(unconfirmed, aim.used[:, n:])

    def promising(self, clean: CleanAnswers, hides: Bool[Tensor, "p n"]) -> Bool[Tensor, "b p"]:
        """True for locations where no mask that hides the patch has a second round unanimous for y."""
        confirmed = self.right(clean).all(dim=2)
        return (confirmed.float() @ hides.float().T) < 0.5


@dataclass(frozen=True)
class FakeUnanimity(PairObjective):
    """All copies under one first mask agree on one wrong label, so that this disagreeing copy wins as unanimous.

    A row of the table holds the copies under one first mask. In its second round, the copies that hide the patch keep
    their clean predictions. Rows where these already agree on a wrong label come first, then those with the largest
    margins for one; attempt a takes the a-th best row.
    """

    def aim(self, clean: CleanAnswers, places: Int64[Tensor, "b *k 4"], attempt: Int64[Tensor, " b"]) -> Aim:
        of_pair = self.of_pair(places.device)
        shows = clean.shows(places)[:, of_pair]
        rows = [self._consider(clean.logits[:, of_pair[m]], clean.labels, shows[:, m], m) for m in range(len(of_pair))]
        wrong, burden = (torch.stack(values, dim=1) for values in zip(*rows, strict=True))
        every = torch.arange(len(places), device=places.device)
        row = burden.argsort(dim=1, stable=True)[every, attempt % len(of_pair)]
        return Aim(of_pair[row], shows[every, row], wrong[every, row])

    def _consider(
        self, row: Float[Tensor, "b n classes"], labels: Int64[Tensor, " b"], shows: Bool[Tensor, "b n"], mask: int
    ) -> tuple[Int64[Tensor, " b"], Float[Tensor, " b"]]:
        """Return the wrong label to aim at in a row, and how hard the row is.

        The label is the strongest wrong one of the copies that hide the patch or, if there are none, of all copies.
        Hard are copies that hide the patch with another prediction, then small margins. A row whose first mask hides
        the patch comes last.
        """
        hidden = ~shows
        pull = torch.where(hidden.any(dim=1, keepdim=True), hidden, shows)
        wrong = strongest_wrong(_mean(row, pull[:, :, None]), labels)
        hopeless = (hidden & (row.argmax(dim=2) != wrong[:, None])).sum(dim=1)
        leaning = _mean(label_margin(row, wrong), shows)
        return wrong, hopeless + len(hidden[0]) * hidden[:, mask] - torch.sigmoid(leaning)

    def loss(self, logits: Float[Tensor, "j k classes"], labels: Int64[Tensor, " j"], aim: Aim) -> Float[Tensor, " j"]:
        return agreement(logits, aim)

    def promising(self, clean: CleanAnswers, hides: Bool[Tensor, "p n"]) -> Bool[Tensor, "b p"]:
        """True for locations shown by a first mask under which no second mask that hides the patch gives y."""
        found = []
        for right in self.right(clean):
            in_the_way = right.float() @ hides.float().T  # [m, p]: second masks that hide p and give y
            found.append(((in_the_way < 0.5) & ~hides.T).any(dim=0))
        return torch.stack(found)


@dataclass(frozen=True)
class OneRound(Objective):
    """Base class for attacks on the copies under each occlusion alone."""

    occlusions: MaskSet | Fields

    def views(self, image_size: Size, device: torch.device) -> Views:
        every = torch.arange(len(self.occlusions))
        return Views.of(self.occlusions.keep(device), every, every)

    def salient_views(self, views: Views) -> Int64[Tensor, " v"]:
        return torch.arange(len(self.occlusions), device=views.first.device)

    def leaning(self, logits: Float[Tensor, "b n classes"]) -> Float[Tensor, "b n classes"]:
        """Scores of each class in each copy, whose mean decides the label to aim at."""
        return logits

    def aim(self, clean: CleanAnswers, places: Int64[Tensor, "b *k 4"], attempt: Int64[Tensor, " b"]) -> Aim:
        """Aim at the strongest wrong label of the copies that hide the patch, since their predictions stay."""
        count = len(self.occlusions)
        shows = clean.shows(places)[:, :count]
        pull = torch.where(shows.all(dim=1, keepdim=True), shows, ~shows)
        view = torch.arange(count, device=places.device).expand(len(places), -1)
        leaning = _mean(self.leaning(clean.logits[:, :count]), pull[:, :, None])
        return Aim(view, shows, strongest_wrong(leaning, clean.labels))


@dataclass(frozen=True)
class SilentAgreement(OneRound):
    """All one-mask copies agree on one wrong label, so that no alarm is raised."""

    def loss(self, logits: Float[Tensor, "j k classes"], labels: Int64[Tensor, " j"], aim: Aim) -> Float[Tensor, " j"]:
        return agreement(logits, aim)

    def promising(self, clean: CleanAnswers, hides: Bool[Tensor, "p n"]) -> Bool[Tensor, "b p"]:
        """True for locations where no copy that hides the patch is predicted as y."""
        right = clean.logits[:, : len(self.occlusions)].argmax(dim=2) == clean.labels[:, None]
        return (right.float() @ hides.float().T) < 0.5


@dataclass(frozen=True)
class StolenVotes(OneRound):
    """The views that show the patch vote for one wrong class, and no longer for y.

    With a `threshold`, a view votes for every class of at least that probability; otherwise for its argmax.
    """

    threshold: float | None = None

    def leaning(self, logits: Float[Tensor, "b n classes"]) -> Float[Tensor, "b n classes"]:
        return logits.softmax(dim=2)

    def loss(self, logits: Float[Tensor, "j k classes"], labels: Int64[Tensor, " j"], aim: Aim) -> Float[Tensor, " j"]:
        if self.threshold is None:
            return _mean(label_margin(logits, aim.wrong).clamp(max=ENOUGH), aim.used)
        odds = math.log(self.threshold / (1 - self.threshold))

        def above(classes: Tensor) -> Tensor:
            """Log-odds of a class in each view, minus the log-odds of the threshold."""
            rows = classes[:, None, None].expand(*logits.shape[:2], 1)
            rest = logits.scatter(2, rows, -torch.inf).logsumexp(dim=2)
            return logits.gather(2, rows)[:, :, 0] - rest - odds

        votes = above(aim.wrong).clamp(max=ENOUGH) - above(labels).clamp(min=-ENOUGH)
        return _mean(votes, aim.used)


def agreement(logits: Float[Tensor, "j k classes"], aim: Aim) -> Float[Tensor, " j"]:
    """The mean margin of the wrong label over the used copies, plus its smallest one: all of them must agree."""
    margins = label_margin(logits, aim.wrong).clamp(max=ENOUGH)
    return _mean(margins, aim.used) + margins.masked_fill(~aim.used, ENOUGH).amin(dim=1)


def strongest_wrong(logits: Float[Tensor, "j classes"], labels: Int64[Tensor, " j"]) -> Int64[Tensor, " j"]:
    """The label with the largest logit among all but the right one."""
    return logits.detach().scatter(1, labels[:, None], -torch.inf).argmax(dim=1)


def _mean(values: Tensor, used: Tensor) -> Tensor:
    """The mean over the used copies, 0 if there are none."""
    used = used.expand_as(values)
    return values.masked_fill(~used, 0).sum(dim=1) / used.sum(dim=1).clamp(min=1)
