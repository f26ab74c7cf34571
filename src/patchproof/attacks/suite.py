"""Attacks in turn on a batch: each on the images that the ones before could not break."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from patchproof.attacks.base import Attack, Attacked, Target, Undefended, answers, image_generator
from patchproof.attacks.gradient import AttackPlan, GradientAttack
from patchproof.attacks.losses import FakeUnanimity, Misclassify, WrongMajority
from patchproof.geometry import MaskSet, PatchThreat, Rect
from patchproof.masking import Engine
from patchproof.types import Classifier, InputError


def undefended_attacks(
    classifier: Classifier, threat: PatchThreat, *, plan: AttackPlan | None = None, engine: Engine | None = None
) -> list[Attack]:
    """Against F alone: cross-entropy, then the margin."""
    target = Undefended(classifier, engine or Engine())
    return [
        GradientAttack(classifier, target, threat, Misclassify(kind), plan=plan, engine=engine)
        for kind in ("cross-entropy", "margin")
    ]


def defended_attacks(
    classifier: Classifier,
    defense: Target,
    threat: PatchThreat,
    masks: MaskSet,
    *,
    plan: AttackPlan | None = None,
    engine: Engine | None = None,
) -> list[Attack]:
    """Against a defence that looks through `masks`: a wrong majority, then a fake unanimous disagreer."""
    return [
        GradientAttack(classifier, defense, threat, objective, masks=masks, plan=plan, engine=engine)
        for objective in (WrongMajority(), FakeUnanimity())
    ]


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
    found = _unpatched(attacks[0], images, labels)
    for turn, attack in enumerate(attacks):
        rows = torch.nonzero(~found.broken)[:, 0]
        if not len(rows):
            break
        generators = [image_generator(seed, indices[row], turn=turn) for row in rows.tolist()]
        found = _merged(found, Attack.__call__(attack, images[rows], labels[rows], generators=generators), rows)
    return found


def _unpatched(attack: Attack, images: Tensor, labels: Tensor) -> Attacked:
    none = torch.zeros_like(labels)
    place = Rect(0, 0, *attack.threat.patch_sizes[0])
    predictions = answers(attack.target, images) if len(images) else labels.clone()
    return Attacked(images.clone(), (place,) * len(images), labels, predictions, none, none + 1)


def _merged(before: Attacked, now: Attacked, rows: Int64[Tensor, " s"]) -> Attacked:
    places = list(before.places)
    for row, place in zip(rows.tolist(), now.places, strict=True):
        places[row] = place
    return replace(
        before,
        images=before.images.index_copy(0, rows, now.images),
        places=tuple(places),
        predictions=before.predictions.index_copy(0, rows, now.predictions),
        passes=before.passes.index_add(0, rows, now.passes),
        queries=before.queries.index_add(0, rows, now.queries),
    )
