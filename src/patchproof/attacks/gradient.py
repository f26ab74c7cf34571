"""Projected gradient ascent inside a patch: sign steps with momentum, from several starts, at several locations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.nn import functional

from patchproof.attacks.base import Attack, Patched, Target, Undefended, answers, wrong_answers
from patchproof.geometry import (
    PatchThreat,
    Rects,
    all_places,
    as_places,
    as_rects,
    best_pairs,
    best_places,
    every_pair,
    grid_places,
    hidden_by,
    inside,
    mass_inside,
)
from patchproof.masking import Aim, CleanAnswers, Engine, Evaluator, Objective, Views, label_margin
from patchproof.settings import AttackPlan
from patchproof.types import Size

LOOKS = 4
"""How often a patch is shown to the target in the course of its steps; an image that breaks is then left alone."""

CANDIDATES = 4
"""Most patches of one image that are optimised together, so that memory does not grow with restarts or places."""

OnStep = Callable[[int, int], None]
"""Called after each step with its number and the number of steps; they begin again for each group of locations."""


@dataclass(frozen=True)
class Misclassify(Objective):
    """F(x′) ≠ y for the undefended classifier, which sees no masks."""

    kind: Literal["cross-entropy", "margin"] = "cross-entropy"

    def views(self, image_size: Size, device: torch.device) -> Views:
        none = torch.zeros(0, dtype=torch.int64)
        return Views.of(torch.ones(0, 1, *image_size, dtype=torch.bool, device=device), none, none)

    def aim(self, clean: CleanAnswers, places: Int64[Tensor, "b *k 4"], attempt: Int64[Tensor, " b"]) -> Aim:
        view = torch.full((len(places), 1), clean.views.whole, device=places.device)
        return Aim(view, torch.ones_like(view, dtype=torch.bool), clean.labels)

    def loss(self, logits: Float[Tensor, "j k classes"], labels: Int64[Tensor, " j"], aim: Aim) -> Float[Tensor, " j"]:
        if self.kind == "margin":
            return -label_margin(logits, labels)[:, 0]
        return functional.cross_entropy(logits[:, 0], labels, reduction="none")


class GradientAttack(Attack):
    """Climbs an objective's loss at the most promising locations; the target's own answer tells if an image is broken.

    `place` fixes the location of the patch, or of both; otherwise the plan says how locations are found.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        target: Target,
        threat: PatchThreat,
        objective: Objective,
        *,
        plan: AttackPlan | None = None,
        place: Rects | None = None,
        on_step: OnStep | None = None,
    ) -> None:
        super().__init__(target, threat)
        self.evaluator, self.objective = evaluator, objective
        self.plan, self.place, self.on_step = plan or AttackPlan(), place, on_step

    def search(
        self, images: Float[Tensor, "b c h w"], labels: Int64[Tensor, " b"], generators: Sequence[torch.Generator]
    ) -> Patched:
        views = self.objective.views(self.threat.image_size, images.device)
        every = torch.arange(len(views.first), device=images.device)
        clean = CleanAnswers(views, labels, self.evaluator.logits(images, views, every))
        places = self.places(clean, images)
        best = _Best(images, places[:, 0], passes=len(every))
        for group in places.split(max(1, CANDIDATES // self.plan.restarts), dim=1):
            for attempts in torch.arange(self.plan.restarts, device=images.device).split(CANDIDATES):
                rows = torch.nonzero(~best.broken)[:, 0]
                if not len(rows):
                    continue
                # Each of these attempts starts at every location of the group, image by image.
                owner = rows.repeat_interleave(group.shape[1] * len(attempts))
                place = group[rows].flatten(0, 1).repeat_interleave(len(attempts), dim=0)
                attempt = attempts.repeat(len(rows) * group.shape[1])
                start, within = images[owner], inside(place, self.threat.image_size)
                for j in torch.nonzero(attempt)[:, 0].tolist():
                    noise = torch.rand(images.shape[1:], generator=generators[int(owner[j])], dtype=images.dtype)
                    start[j] = torch.where(within[j], noise.to(images.device), start[j])
                candidates = _Candidates(owner, place, attempt, within, start, torch.zeros_like(start))
                self._climb(clean, candidates, best)
        return Patched(best.images, as_rects(best.places), best.passes, best.queries)

    def places(self, clean: CleanAnswers, images: Float[Tensor, "b c h w"]) -> Int64[Tensor, "b r *k 4"]:
        """Return the locations to try on each image, best first."""
        every, pairs = all_places(self.threat), self.threat.patches == 2
        fixed = None
        if self.place is not None:
            fixed = as_places(self.place)
        elif self.plan.place_search == "grid":
            fixed = grid_places(self.threat, self.plan.places)
        elif self.plan.place_search == "exhaustive":
            fixed = every_pair(every) if pairs else every
        if fixed is not None:
            return fixed.to(images.device).expand(len(images), *fixed.shape)
        every = every.to(images.device)
        # Σ_c |∂ cross-entropy / ∂x| over the objective's salient views, summed over the pixels of each location.
        view = self.objective.salient_views(clean.views).expand(len(images), -1)
        aim = Aim(view, torch.ones_like(view, dtype=torch.bool), clean.labels)
        _, gradient = self.evaluator.gradient(images, clean.labels, clean.views, aim, _cross_entropy)
        mass = mass_inside(gradient.abs().sum(dim=1), every)
        score = mass / mass.amax(dim=1, keepdim=True).clamp(min=torch.finfo(mass.dtype).tiny)
        hides = hidden_by(every, clean.views.masks)
        score = score + 2 * self.objective.promising(clean, hides)
        if not pairs:
            return every[best_places(score, every, self.plan.places)]
        best = best_pairs(score, every, self.plan.places)
        for row in range(len(images)):
            # A pair leaves more open than each of its locations, since fewer masks hide both.
            hide_both = hides[best[row]].all(dim=1)
            (promising,) = self.objective.promising(clean[torch.tensor([row])], hide_both)
            best[row] = best[row][promising.long().argsort(descending=True, stable=True)]
        return every[best[:, : self.plan.places]]

    def _climb(self, clean: CleanAnswers, candidates: _Candidates, best: _Best) -> None:
        """Take all steps for one group of locations; images that break are taken out at the next look."""
        aim = self.objective.aim(clean[candidates.owner], candidates.place, candidates.attempt)
        looks = {-(-self.plan.steps * look // LOOKS) for look in range(1, LOOKS + 1)}
        for step in range(self.plan.steps):
            labels = clean.labels[candidates.owner]
            value, gradient = self.evaluator.gradient(candidates.images, labels, clean.views, aim, self.objective.loss)
            best.passes.index_add_(0, candidates.owner, aim.passes)
            candidates.step(gradient, self.plan.step_size * (1 - step / self.plan.steps))
            if self.on_step is not None:
                self.on_step(step + 1, self.plan.steps)
            if step + 1 in looks:
                answer = self.target.predict(candidates.images)
                best.judge(candidates, value, wrong_answers(self.target, answer, labels))
                left = torch.nonzero(~best.broken[candidates.owner])[:, 0]
                candidates, aim = candidates[left], aim[left]
                if not len(left):
                    return


@dataclass
class _Candidates:
    """Patches that are optimised together: candidate j is on image `owner[j]`."""

    owner: Int64[Tensor, " j"]
    place: Int64[Tensor, "j *k 4"]
    attempt: Int64[Tensor, " j"]
    within: Bool[Tensor, "j 1 h w"]
    images: Float[Tensor, "j c h w"]
    momentum: Float[Tensor, "j c h w"]

    def __getitem__(self, rows: Tensor) -> _Candidates:
        return _Candidates(*(getattr(self, f.name)[rows] for f in fields(self)))

    def step(self, gradient: Tensor, size: float) -> None:
        """Move up the sign of the running gradient, inside the patch and inside [0, 1]."""
        gradient = gradient.masked_fill(~self.within, 0)
        scale = gradient.abs().mean(dim=(1, 2, 3), keepdim=True).clamp(min=torch.finfo(gradient.dtype).tiny)
        self.momentum = 0.9 * self.momentum + gradient / scale
        moved = (self.images + size * self.momentum.sign()).clamp(0, 1)
        self.images = torch.where(self.within, moved, self.images)


class _Best:
    """For each image the first patch that broke it, or else the one of greatest loss."""

    def __init__(self, images: Float[Tensor, "b c h w"], places: Int64[Tensor, "b *k 4"], *, passes: int) -> None:
        none = torch.zeros(len(images), dtype=torch.int64, device=images.device)
        self.images, self.places, self.broken = images.clone(), places.clone(), none.bool()
        self.value = torch.full((len(images),), -torch.inf, device=images.device)
        self.passes, self.queries = none + passes, none.clone()

    def judge(self, candidates: _Candidates, value: Float[Tensor, " j"], wrong: Bool[Tensor, " j"]) -> None:
        self.queries.index_add_(0, candidates.owner, torch.ones_like(candidates.owner))
        score = torch.where(wrong, torch.inf, value.clamp(max=torch.finfo(value.dtype).max))
        for row in candidates.owner.unique().tolist():
            mine = torch.nonzero(candidates.owner == row)[:, 0]
            pick = mine[score[mine].argmax()]
            if score[pick] > self.value[row]:
                self.images[row], self.places[row] = candidates.images[pick], candidates.place[pick]
                self.value[row], self.broken[row] = score[pick], wrong[pick]


def _cross_entropy(logits: Tensor, labels: Tensor, aim: Aim) -> Tensor:
    """Return the mean over all copies of each candidate."""
    every = functional.cross_entropy(logits.flatten(0, 1), labels.repeat_interleave(logits.shape[1]), reduction="none")
    return every.unflatten(0, logits.shape[:2]).mean(dim=1)


class NoiseAttack(Attack):
    """Tries patches of uniform noise on an even grid of locations: all that is left against an unknown target."""

    def __init__(self, target: Target, threat: PatchThreat, plan: AttackPlan | None = None) -> None:
        super().__init__(target, threat)
        self.plan = plan or AttackPlan()

    def search(
        self, images: Float[Tensor, "b c h w"], labels: Int64[Tensor, " b"], generators: Sequence[torch.Generator]
    ) -> Patched:
        places = grid_places(self.threat, self.plan.places).to(images.device)
        best = _Best(images, places[:1].expand(len(images), *places.shape[1:]), passes=0)
        for place in places.repeat_interleave(self.plan.restarts, dim=0):
            tried = images.clone()
            for row, generator in enumerate(generators):
                for top, left, height, width in place.view(-1, 4).tolist():
                    noise = torch.rand(images.shape[1], height, width, generator=generator)
                    tried[row, :, top : top + height, left : left + width] = noise.to(images)
            fell = wrong_answers(self.target, answers(self.target, tried), labels) & ~best.broken
            best.queries += ~best.broken
            best.images[fell], best.places[fell] = tried[fell], place
            best.broken |= fell
        return Patched(best.images, as_rects(best.places), best.passes, best.queries)


def undefended_attacks(
    evaluator: Evaluator, threat: PatchThreat, plan: AttackPlan | None = None, *, on_step: OnStep | None = None
) -> list[Attack]:
    """Return the attacks on F alone: cross-entropy, then the margin."""
    target = Undefended(evaluator)
    objectives = Misclassify("cross-entropy"), Misclassify("margin")
    return [GradientAttack(evaluator, target, threat, each, plan=plan, on_step=on_step) for each in objectives]


def defended_attacks(
    defense: Any, plan: AttackPlan | None = None, *, engine: Engine | None = None, on_step: OnStep | None = None
) -> list[Attack]:
    """Return the attacks on a defence: one for each way to fail that it lists (`objectives()`), else one on the margin
    of its differentiable scores (`surrogate`) or its classifier; noise if it has no classifier."""
    classifier = getattr(defense, "classifier", None)
    if classifier is None:
        return [NoiseAttack(defense, defense.threat, plan)]
    climbed = getattr(defense, "surrogate", classifier)
    evaluator = Evaluator(climbed, engine or getattr(defense, "engine", None) or Engine())
    ways: Sequence[Objective] = defense.objectives() if hasattr(defense, "objectives") else (Misclassify("margin"),)
    return [GradientAttack(evaluator, defense, defense.threat, each, plan=plan, on_step=on_step) for each in ways]
