"""Attacks in turn on a batch: each on the images that the ones before could not break."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from patchproof.attacks.base import (
    Attack,
    Attacked,
    Patched,
    Target,
    Undefended,
    answers,
    image_generator,
    wrong_answers,
)
from patchproof.attacks.gradient import AttackPlan, GradientAttack, Misclassify
from patchproof.geometry import PatchThreat, Rect, as_rects, grid_places
from patchproof.masking import Engine, Evaluator, Objective
from patchproof.types import InputError


def undefended_attacks(evaluator: Evaluator, threat: PatchThreat, plan: AttackPlan | None = None) -> list[Attack]:
    """Against F alone: cross-entropy, then the margin."""
    target = Undefended(evaluator)
    objectives = Misclassify("cross-entropy"), Misclassify("margin")
    return [GradientAttack(evaluator, target, threat, objective, plan=plan) for objective in objectives]


def defended_attacks(defense: Any, plan: AttackPlan | None = None, *, engine: Engine | None = None) -> list[Attack]:
    """Against a defence, adaptively where it says how it can fail (`objectives()`); through its classifier alone where
    it only has that; with noise where it has neither."""
    classifier = getattr(defense, "classifier", None)
    if classifier is None:
        return [NoiseAttack(defense, defense.threat, plan)]
    evaluator = Evaluator(classifier, engine or getattr(defense, "engine", None) or Engine())
    ways: Sequence[Objective] = defense.objectives() if hasattr(defense, "objectives") else (Misclassify("margin"),)
    return [GradientAttack(evaluator, defense, defense.threat, objective, plan=plan) for objective in ways]


class NoiseAttack(Attack):
    """Patches of uniform noise on an even grid of places: what is left where nothing is known of the target."""

    def __init__(self, target: Target, threat: PatchThreat, plan: AttackPlan | None = None) -> None:
        super().__init__(target, threat)
        self.plan = plan or AttackPlan()

    def search(
        self, images: Float[Tensor, "b c h w"], labels: Int64[Tensor, " b"], generators: Sequence[torch.Generator]
    ) -> Patched:
        places = as_rects(grid_places(self.threat, self.plan.places))
        best, chosen = images.clone(), [places[0]] * len(images)
        broken, queries = torch.zeros_like(labels, dtype=torch.bool), torch.zeros_like(labels)
        for place in (place for place in places for _ in range(self.plan.restarts)):
            tried = images.clone()
            for row, generator in enumerate(generators):
                noise = torch.rand(images.shape[1], place.height, place.width, generator=generator)
                tried[row, :, place.top : place.bottom, place.left : place.right] = noise.to(images)
            answer = answers(self.target, tried)
            queries += (~broken).long()
            fell = wrong_answers(self.target, answer, labels) & ~broken
            best[fell], broken = tried[fell], broken | fell
            chosen = [place if now else before for before, now in zip(chosen, fell.tolist(), strict=True)]
        return Patched(best, tuple(chosen), torch.zeros_like(labels), queries)


def attack_in_turn(
    attacks: Sequence[Attack],
    images: Float[Tensor, "b c h w"],
    labels: Int64[Tensor, " b"],
    *,
    seed: int,
    indices: Sequence[int],
) -> Attacked:
    """The strongest patch that any of the attacks found for each image.

    An image that is answered wrongly as it is counts as broken: a patch may also leave all pixels as they are.
    """
    if not attacks:
        raise InputError("there is no attack to run; take defended_attacks(…) or undefended_attacks(…)")
    first, none = attacks[0], torch.zeros_like(labels)
    places = [Rect(0, 0, *first.threat.patch_sizes[0])] * len(images)
    predictions = answers(first.target, images)
    wrong = wrong_answers(first.target, predictions, labels)
    found = Attacked(images.clone(), tuple(places), none, none + 1, labels, predictions, wrong)
    for turn, attack in enumerate(attacks):
        rows = torch.nonzero(~found.broken)[:, 0]
        if not len(rows):
            break
        generators = [image_generator(seed, indices[row], turn=turn) for row in rows.tolist()]
        now = Attack.__call__(attack, images[rows], labels[rows], generators=generators)
        for row, place in zip(rows.tolist(), now.places, strict=True):
            places[row] = place
        found = Attacked(
            found.images.index_copy(0, rows, now.images),
            tuple(places),
            found.passes.index_add(0, rows, now.passes),
            found.queries.index_add(0, rows, now.queries),
            labels,
            found.predictions.index_copy(0, rows, now.predictions),
            found.broken.index_copy(0, rows, now.broken),
        )
    return found
