"""The objectives of attacks against their definitions: promising locations, aims and losses."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

import patchproof as pp
import reference
from patchproof.defenses._objectives import FakeUnanimity, SilentAgreement, WrongMajority
from patchproof.geometry import all_places, as_rects, hidden_by
from patchproof.masking import Aim, CleanAnswers, Evaluator

THREAT = pp.PatchThreat((7, 6), ((2, 3),))
MASKS = pp.covering_masks(THREAT, per_axis=3)
PLACES, HIDES = all_places(THREAT), hidden_by(all_places(THREAT), MASKS.keep())
OBJECTIVES = WrongMajority(MASKS), FakeUnanimity(MASKS), SilentAgreement(MASKS)


def exact_scene(seed: int):
    """Three images, and the clean answers that each objective reads."""
    generator = torch.Generator().manual_seed(seed)
    classifier = reference.ExactClassifier((7, 6), 3, generator)
    images = torch.randint(0, 5, (3, 2, 7, 6), generator=generator) / 4
    labels = classifier(images).argmax(dim=1)
    scenes = []
    for objective in OBJECTIVES:
        views = objective.views((7, 6), torch.device("cpu"))
        logits = Evaluator(classifier, pp.Engine()).logits(images, views, torch.arange(len(views.first)))
        scenes.append(CleanAnswers(views, labels, logits))
    return classifier, images, labels, scenes


@given(st.integers(0, 2**32))
@settings(max_examples=15)
def test_promising_locations_equal_the_definition(seed):
    classifier, images, labels, scenes = exact_scene(seed)
    found = [o.promising(scene, HIDES) for o, scene in zip(OBJECTIVES, scenes, strict=True)]
    for b, image in enumerate(images):
        label = int(labels[b])
        table = [[reference.argmax(c) for c in row] for row in reference.two_mask_logits(classifier, image, MASKS)]
        for p, place in enumerate(as_rects(PLACES)):
            hiding = [m for m, rect in enumerate(MASKS.rects) if rect.contains(place)]
            confirmed = [m for m in hiding if all(answer == label for answer in table[m])]
            rows = [m for m in range(len(MASKS)) if m not in hiding and all(table[m][i] != label for i in hiding)]
            right = [m for m in hiding if table[m][m] == label]
            assert [bool(each[b, p]) for each in found] == [not confirmed, bool(rows), not right]


@given(st.integers(0, 2**32))
@settings(max_examples=15)
def test_aims_use_exactly_the_copies_that_show_the_patch(seed):
    _, _, labels, scenes = exact_scene(seed)
    draw = torch.Generator().manual_seed(seed)
    places = PLACES[torch.randint(len(PLACES), (3,), generator=draw)]
    attempt, n, of_pair = torch.randint(2, (3,), generator=draw), len(MASKS), MASKS.unions.of_pair
    majority, unanimity, silence = (
        objective.aim(scene, places, attempt) for objective, scene in zip(OBJECTIVES, scenes, strict=True)
    )
    for b, patch in enumerate(as_rects(places)):
        pixels = reference.hide(torch.zeros(1, 7, 6), [patch], [1.0]) > 0
        shows = [[bool((pixels & x & y).any()) for y in MASKS.keep()] for x in MASKS.keep()]
        alone = [shows[m][m] for m in range(n)]
        assert majority.view[b, :n].tolist() == of_pair.diagonal().tolist()
        assert majority.used[b, :n].tolist() == alone
        rows = [m for m in range(n) if of_pair[m].tolist() == unanimity.view[b].tolist()]
        assert any(unanimity.used[b].tolist() == shows[m] for m in rows)
        assert (silence.view[b].tolist(), silence.used[b].tolist()) == (list(range(n)), alone)
        assert int(labels[b]) not in (int(unanimity.wrong[b]), int(silence.wrong[b]))


def answers(*labels: int) -> torch.Tensor:
    """Logits of one image's copies that predict these labels by a large margin."""
    return 5.0 * functional.one_hot(torch.tensor([labels]), 3).float()


def loss_of(objective, logits, used=None, wrong=1) -> float:
    view = torch.zeros(logits.shape[:2], dtype=torch.int64)
    used = torch.ones_like(view, dtype=torch.bool) if used is None else torch.tensor([used])
    return float(objective.loss(logits, torch.tensor([0]), Aim(view, used, torch.tensor([wrong]))))


def test_wrong_majority_rewards_agreeing_votes_and_contradicted_second_rounds():
    """The label is 0. Three one-mask copies, then the weakest copy in the second round of each."""
    objective = WrongMajority(MASKS)
    ladder = [(0, 0, 0, 0, 0, 0), (1, 0, 0, 1, 0, 0), (1, 1, 0, 1, 1, 0), (1, 1, 0, 1, 1, 2), (1, 1, 1, 1, 1, 2)]
    losses = [loss_of(objective, answers(*step)) for step in ladder]
    assert losses == sorted(set(losses))
    assert loss_of(objective, answers(1, 1, 0, 1, 1, 0)) > loss_of(objective, answers(1, 2, 0, 1, 2, 0))
    unseen = [True, True, False, True, True, False]
    assert loss_of(objective, answers(1, 1, 0, 1, 1, 0), unseen) == loss_of(objective, answers(1, 1, 1, 1, 1, 1))


def test_agreement_on_a_wrong_label_rewards_every_copy_and_the_last_one_most():
    for objective in (FakeUnanimity(MASKS), SilentAgreement(MASKS)):
        losses = [loss_of(objective, answers(*row)) for row in [(0, 0, 0), (1, 0, 0), (1, 1, 0), (1, 1, 1)]]
        steps = [b - a for a, b in itertools.pairwise(losses)]
        assert min(steps) > 0
        assert steps[2] > steps[0]
        assert loss_of(objective, answers(1, 1, 2)) == loss_of(objective, answers(1, 1, 0))
        assert loss_of(objective, answers(1, 1, 0), [True, True, False]) == losses[3]
