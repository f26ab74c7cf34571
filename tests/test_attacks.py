"""Attacks: what the base class refuses, and that the search finds the patches there are (that it has teeth)."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

import patchproof as pp
import reference
from patchproof.attacks import (
    Attack,
    AttackPlan,
    GradientAttack,
    Misclassify,
    Patched,
    Undefended,
    attack_in_turn,
    defended_attacks,
    image_generator,
    undefended_attacks,
)
from patchproof.attacks.base import check_patched
from patchproof.attacks.gradient import NoiseAttack
from patchproof.data import open_dataset
from patchproof.masking import Evaluator
from patchproof.types import CheckError, InputError
from reference import measured
from small_model import plain_classifier

campaign_path = Path(__file__).parents[1] / "scripts" / "campaign.py"
spec = importlib.util.spec_from_file_location("campaign", campaign_path)
campaign = sys.modules["campaign"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(campaign)


def generators(count: int) -> list[torch.Generator]:
    return [image_generator(0, index) for index in range(count)]


def seen_by(classifier, **engine) -> Evaluator:
    return Evaluator(classifier, pp.Engine(**engine))


# --- the base class ------------------------------------------------------------------------------------------------

THREAT = pp.PatchThreat((8, 10), ((3, 2), (2, 4)))
PLACE, EVERYWHERE = pp.Rect(1, 1, 3, 2), pp.Rect(0, 0, 8, 10)
GREY, ZEROS = torch.full((2, 1, 8, 10), 0.25), torch.zeros(2, dtype=torch.int64)


class Plugin(Attack):
    """An attack that proposes whatever `make(plugin, images, zeros)` returns."""

    def __init__(self, make, target=None):
        super().__init__(target or Undefended(seen_by(lambda images: images.flatten(1)[:, :3])), THREAT)
        self.make = make

    def search(self, images, labels, generators):
        with pytest.MonkeyPatch.context() as patch:  # the tests' own shape checks would stop some proposals first
            patch.setattr(Patched, "__init__", lambda self, *values: vars(self).update(zip(PARTS, values, strict=True)))
            return self.make(self, images, torch.zeros_like(labels))


PARTS = "images", "places", "passes", "queries"


def paint(change=PLACE, place=PLACE, value=1.0, then=lambda images: images):
    """A proposal that sets the pixels of `change` to `value` and claims that the patch is at `place`."""

    def make(_plugin, images, count):
        images[:, :, change.top : change.bottom, change.left : change.right] = value
        return Patched(then(images), (place,) * len(count), count, count)

    return make


def call(make, target=None):
    return Plugin(make, target)(GREY, ZEROS, generators=generators(2))


def raise_the_threat(plugin, images, count):
    plugin.threat = pp.PatchThreat((8, 10), ((8, 10),))
    return Patched(torch.ones_like(images), (EVERYWHERE,) * 2, count, count)


REFUSED = {
    "a pixel outside": (paint(pp.Rect(1, 1, 3, 3)), "3 pixels outside .* were changed, e.g. row 1, column 3"),
    "everywhere": (paint(EVERYWHERE), "74 pixels outside"),
    "two patches": (paint(then=lambda x: x.index_fill(3, torch.tensor([9]), 0.5)), "8 pixels outside .* column 9"),
    "a larger patch": (paint(pp.Rect(1, 1, 3, 4), pp.Rect(1, 1, 3, 4)), "a patch of 3×4 .* 3×2 or 2×4"),
    "a turned patch": (paint(pp.Rect(1, 1, 2, 3), pp.Rect(1, 1, 2, 3)), "a patch of 2×3 pixels"),
    "a patch over the rim": (paint(pp.Rect(6, 1, 2, 2), pp.Rect(6, 1, 3, 2)), "not inside the image"),
    "a negative place": (paint(pp.Rect(0, 0, 2, 2), pp.Rect(-1, 0, 3, 2)), "not inside the image"),
    "too bright": (paint(value=1.5), r"pixels in \[0.25, 1.5\]"),
    "too dark": (paint(value=-0.01), r"pixels in \[-0.01, 0.25\]"),
    "NaN": (paint(value=torch.nan), r"pixels in \[nan, nan\]"),
    "infinite": (paint(value=torch.inf), r"pixels in \[0.25, inf\]"),
    "another type": (paint(then=lambda x: x.double()), "float64.* for images of .*float32"),
    "another shape": (paint(then=lambda x: x[:, :, :7]), r"\(2, 1, 7, 10\).* for images of .*\(2, 1, 8, 10\)"),
    "another threat": (raise_the_threat, "a patch of 8×10 pixels, allowed is"),
    "nothing": (lambda *_: None, "must return attacks.Patched"),
    "one count": (lambda _plugin, x, n: Patched(x, (PLACE,) * 2, n, n[:1]), "must count .* with 2 numbers"),
    "a plain count": (lambda _plugin, x, n: Patched(x, (PLACE,) * 2, 9, n), "must count passes and queries in one"),
    "a missing place": (lambda _plugin, x, n: Patched(x, (PLACE,), n, n), "names 1 places for 2 images"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_proposal_that_is_not_one_patch_of_the_threat_is_refused(name):
    make, message = REFUSED[name]
    with pytest.raises(CheckError, match=f"Plugin.*{message}"):
        call(make)


@pytest.mark.parametrize("place", [pp.Rect(0, 0, 3, 2), pp.Rect(5, 8, 3, 2), pp.Rect(6, 6, 2, 4)])
def test_one_patch_anywhere_inside_the_image_is_allowed_and_copied(place):
    kept = []
    found = call(paint(place, place, then=lambda x: kept.append(x) or x))
    kept[0].zero_()
    assert found.places == (place, place)
    assert torch.equal(found.images, torch.stack([reference.hide(image, [place], [1.0]) for image in GREY]))
    assert found.queries.tolist() == [1, 1]


class Vandal:
    def predict(self, images):
        images.fill_(1)
        return torch.zeros(len(images), dtype=torch.int64)


def test_what_was_checked_is_what_the_target_of_before_the_search_is_asked():
    def take_over(plugin, images, count):
        plugin.target = Undefended(seen_by(lambda images: images.flatten(1)[:, :3] * torch.nan))
        return Patched(images, (PLACE,) * 2, count, count)

    found = call(take_over, Vandal())
    assert not bool(found.broken.any())
    assert torch.equal(found.images, GREY)
    attack_in_turn([Plugin(paint(), Vandal())], GREY, ZEROS, seed=0, indices=[0, 1])
    assert bool((GREY == 0.25).all())
    with pytest.raises(CheckError, match=r"predict returned shape \(\) for 2 images"):
        call(paint(), SimpleNamespace(predict=lambda images: torch.tensor(0)))


def test_wrong_images_and_generators_are_refused():
    for images, count, message in (
        (GREY[:, :, :7], 2, r"height and width \(8, 10\)"),
        (255 * GREY, 2, r"values in \[0, 1\]"),
        (GREY, 1, "2 images need as many generators, not 1"),
    ):
        with pytest.raises(InputError, match=message):
            Plugin(paint())(images, ZEROS, generators=generators(count))


# --- the search finds the patches there are ------------------------------------------------------------------------


def linear_case(seed: int):
    """A linear classifier: the best patch has only pixels 0 and 1, so brute force over these is exact."""
    generator = torch.Generator().manual_seed(seed)
    threat = pp.PatchThreat((4, 4), ((2, 2),))
    classifier = reference.ExactClassifier((4, 4), 3, generator, channels=1)
    images = torch.randint(0, 5, (8, 1, 4, 4), generator=generator) / 4
    labels = classifier(images).argmax(dim=1)
    return threat, classifier, images, labels


def falls(target, image, label, threat) -> bool:
    """True if any black-and-white patch at any location changes the answer to another label (an alarm is none)."""
    contents = torch.tensor(list(itertools.product([0.0, 1.0], repeat=4))).view(-1, 1, 2, 2)
    for r in reference.all_patches(threat.image_size, threat.patch_sizes[0]):
        patched = image.repeat(len(contents), 1, 1, 1)
        patched[:, :, r.top : r.bottom, r.left : r.right] = contents
        answers = target.predict(patched)
        if bool(((answers != label) & (answers >= 0)).any()):
            return True
    return False


@pytest.mark.parametrize("seed", range(2))
def test_exhaustive_margin_attack_breaks_exactly_what_brute_force_breaks(seed):
    threat, classifier, images, labels = linear_case(seed)
    target = Undefended(seen_by(classifier))
    plan = AttackPlan(steps=12, restarts=1, step_size=0.3, place_search="exhaustive")
    attack = GradientAttack(seen_by(classifier), target, threat, Misclassify("margin"), plan=plan)
    found = attack(images, labels, generators=generators(len(images)))
    expected = [falls(target, image, label, threat) for image, label in zip(images, labels, strict=True)]
    assert found.broken.tolist() == expected
    assert any(expected)


@pytest.mark.parametrize(
    ("kind", "cases"),
    [(pp.PatchCleanser, 1), (pp.Alarm, 2), pytest.param(pp.PatchCleanser, 9, marks=pytest.mark.slow)],
)
def test_adaptive_attacks_break_nearly_all_that_brute_force_breaks(kind, cases):
    """Brute force tries every black-and-white patch at every location on the whole defence, judged by predict."""
    brute, attacked = set(), set()
    for seed in range(cases):
        threat, classifier, images, labels = linear_case(seed)
        masks = pp.covering_masks(threat, per_axis=2)
        defense = kind(classifier, masks, threat, engine=measured(batch_size=512))
        answers = defense.predict(images)
        labels = torch.where(answers < 0, labels, answers)  # an image that raises an alarm as it is may be silenced
        certified = defense.certify(images, labels).certified
        plan = AttackPlan(steps=8, restarts=2, step_size=0.3, place_search="exhaustive")
        found = attack_in_turn(defended_attacks(defense, plan), images, labels, seed=seed, indices=range(len(images)))
        assert not bool((found.broken & certified).any())
        brute |= {(seed, row) for row, image in enumerate(images) if falls(defense, image, labels[row], threat)}
        attacked |= {(seed, row) for row in torch.nonzero(found.broken)[:, 0].tolist()}
    assert len(brute) >= 3 * cases
    assert attacked <= brute
    assert len(attacked) >= 0.9 * len(brute)


@pytest.mark.parametrize("search", ["gradient", pytest.param("grid", marks=pytest.mark.slow)])
def test_findings_are_independent_of_batch_and_order_and_no_pass_is_larger_than_the_chunk(search):
    generator = torch.Generator().manual_seed(4)
    threat = pp.PatchThreat((9, 8), ((3, 3),))
    curved, seen = reference.Curved((9, 8), 4, generator), {True: 0, False: 0}

    class Watched:
        fill = curved.fill

        def __call__(self, images):
            seen[images.requires_grad] = max(seen[images.requires_grad], len(images))
            return curved(images)

    images = torch.rand(3, 2, 9, 8, generator=generator)
    engine = measured(batch_size=16)
    defense = pp.PatchCleanser(Watched(), pp.covering_masks(threat, per_axis=2), threat, engine=engine)
    labels = defense.predict(images)
    attacks = defended_attacks(defense, AttackPlan(steps=6, restarts=3, places=3, place_search=search))
    indices = [3, 14, 15]
    together = attack_in_turn(attacks, images, labels, seed=1, indices=indices)
    assert seen == {True: 4, False: 16}
    for order in ([2, 0, 1], [1]):
        some = attack_in_turn(attacks, images[order], labels[order], seed=1, indices=[indices[i] for i in order])
        assert torch.allclose(some.images, together.images[order], atol=1e-4)
        assert some.places == tuple(together.places[i] for i in order)
        for name in ("predictions", "passes", "queries"):
            assert torch.equal(getattr(some, name), getattr(together, name)[order]), name


def test_many_restarts_take_no_more_memory_and_each_is_another_start(generator, monkeypatch):
    threat = pp.PatchThreat((9, 8), ((3, 3),))
    curved, images = reference.Curved((9, 8), 4, generator), torch.rand(2, 2, 9, 8, generator=generator)
    sure = torch.tensor([1000.0, 0, 0, 0])
    evaluator, started = Evaluator(lambda images: curved(images) + sure, measured()), []
    climb = GradientAttack._climb

    def watched(self, clean, candidates, best):
        started.append(candidates)
        return climb(self, clean, candidates, best)

    monkeypatch.setattr(GradientAttack, "_climb", watched)
    attacks = undefended_attacks(evaluator, threat, AttackPlan(steps=1, restarts=11, places=1, step_size=1e-9))[:1]
    labels = evaluator.labels(images)
    attack_in_turn(attacks, images, labels, seed=1, indices=[0, 1])
    assert [len(candidates.owner) for candidates in started] == [8, 8, 6], "four starts of each image at a time"
    attempts = [a for candidates in started for a in candidates.attempt[candidates.owner == 0].tolist()]
    pixels = {c.images[j].numpy().tobytes() for c in started for j in range(len(c.owner)) if c.owner[j] == 0}
    assert attempts == list(range(11))
    assert len(pixels) == 11


def test_every_seed_image_and_turn_has_its_own_random_stream():
    streams = {
        key: torch.rand(4, generator=image_generator(key[0], key[1], turn=key[2])).tolist()
        for key in itertools.product((0, 1, 12), (0, 1, 21), (0, 1))
    }
    assert len({tuple(values) for values in streams.values()}) == len(streams)
    assert torch.rand(4, generator=image_generator(12, 1, turn=0)).tolist() == streams[12, 1, 0]


def test_images_answered_wrongly_as_they_are_need_no_patch():
    threat, classifier, images, labels = linear_case(0)
    attacks = undefended_attacks(seen_by(classifier), threat)
    found = attack_in_turn(attacks, images, (labels + 1) % 3, seed=0, indices=range(8))
    assert bool(found.broken.all())
    assert torch.equal(found.images, images)
    assert found.passes.tolist() == [0] * 8
    with pytest.raises(InputError, match="no attack to run"):
        attack_in_turn([], images, labels, seed=0, indices=range(8))


def test_gradient_patches_break_more_than_noise_which_is_for_unknown_defences():
    network, source = plain_classifier(), open_dataset("fashion-mini")
    images = torch.from_numpy(source.pixels[:24])[:, None].expand(-1, 3, -1, -1) / 255
    threat, target = pp.PatchThreat.square(image_size=(28, 28), pixels=4), Undefended(seen_by(network))
    labels = target.predict(images)
    plan = AttackPlan(steps=4, restarts=1, places=4)
    unknown = SimpleNamespace(predict=target.predict, threat=threat)
    (noise,) = defended_attacks(unknown, plan)
    assert isinstance(noise, NoiseAttack)
    fell = [
        attack_in_turn(attacks, images, labels, seed=0, indices=range(24)).broken
        for attacks in ([noise], undefended_attacks(seen_by(network), threat, plan))
    ]
    assert 0 < int(fell[0].sum()) < int(fell[1].sum())


# --- teeth ---------------------------------------------------------------------------------------------------------


class Startled:
    """A classifier that answers 0 unless it sees bright pixels: dark images are certified, a bright patch upsets F."""

    fill = (0.2,)

    def __call__(self, images):
        bright = functional.softplus(20 * (images - 0.6)).sum(dim=(1, 2, 3)) / 20
        return torch.stack([torch.full_like(bright, 0.5), bright], dim=1)


class StartledInTheDark(Startled):
    """Startled only while the corner pixel is hidden; otherwise bright pixels reassure it.

    So a loss over the majority makes the patch dark, and only the row of copies that hides the corner can be turned.
    """

    def __call__(self, images):
        logits = super().__call__(images)
        hidden = (images[:, 0, 0, 0] == self.fill[0]).float()
        return torch.stack([logits[:, 0], logits[:, 1] * (4 * hidden - 3)], dim=1)


# Masks of 6 at 0, 4 and 6: patches that start in row or column 6 or 7 are hidden by two masks.
DARK_THREAT = pp.PatchThreat.square(image_size=(12, 12), pixels=3)
DARK = 0.3 + 0.1 * torch.rand(3, 1, 12, 12, generator=torch.Generator().manual_seed(0))
RIGHT = torch.zeros(3, dtype=torch.int64)
TEETH = AttackPlan(steps=16, restarts=1, places=6)


def dark_defense(classifier):
    masks = pp.covering_masks(DARK_THREAT, per_axis=3)
    return pp.PatchCleanser(classifier, masks, DARK_THREAT, engine=measured(batch_size=512))


def test_double_masking_holds_where_both_broken_defences_fall():
    true, queries = dark_defense(Startled()), {}
    everywhere = AttackPlan(steps=2, restarts=1, places=36, place_search="grid", step_size=0.3)
    for name, defense in {"double masking": true, **campaign.broken_defenses(true)}.items():
        assert bool(defense.certify(DARK, RIGHT).certified.all())
        found = attack_in_turn(defended_attacks(defense, everywhere), DARK[:1], RIGHT[:1], seed=0, indices=[0])
        assert found.broken.tolist() == [defense is not true], name
        queries[name] = int(found.queries.sum())
    assert max(list(queries.values())[1:]) < 0.9 * queries["double masking"], "broken images are left alone"


@pytest.mark.parametrize("number", [0, 4, 7])
def test_whichever_mask_is_removed_the_attack_goes_where_it_was(number):
    """The search knows the mask set, not which mask is missing, and tries six of a hundred locations."""
    true = dark_defense(Startled())
    fewer = campaign.without_mask(true.masks, number)
    broken = campaign.MaskRemoved(true.classifier, fewer, DARK_THREAT, engine=true.engine)
    found = attack_in_turn(defended_attacks(broken, TEETH), DARK, RIGHT, seed=0, indices=range(3))
    assert found.broken.all()
    assert set(found.places) <= set(fewer.uncovered(DARK_THREAT))


class StartledTwice(Startled):
    """Answers 0 unless it sees bright pixels in the left and in the right third, where no single patch reaches both."""

    def __call__(self, images):
        left, right = (super(StartledTwice, self).__call__(part)[:, 1] for part in (images[..., :4], images[..., 8:]))
        return torch.stack([torch.full_like(left, 0.5), left * right], dim=1)


@pytest.mark.parametrize("kind", [pp.PatchCleanser, pp.Alarm])
def test_two_patches_break_what_one_cannot_and_no_certificate_until_a_union_is_dropped(kind, monkeypatch):
    image, right = DARK[:1], RIGHT[:1]

    def attacked(attacks):
        return attack_in_turn(attacks, image, right, seed=0, indices=[0])

    for patches, search in ((1, "gradient"), (2, "gradient"), (2, "grid")):
        threat = pp.PatchThreat.square(image_size=(12, 12), pixels=3, patches=patches)
        plan = AttackPlan(steps=8, restarts=1, places=3, place_search=search, step_size=0.3)
        alone = attacked(undefended_attacks(seen_by(StartledTwice()), threat, plan))
        assert alone.broken.tolist() == [patches == 2]
        assert isinstance(alone.places[0], pp.Rect if patches == 1 else tuple)
    defense = kind(Startled(), pp.covering_masks(threat, per_axis=2), threat, engine=measured(batch_size=512))
    fewer = pp.MaskSet((12, 12), tuple(mask for mask in defense.masks.rects if len(mask) == 1))
    missed = set(fewer.uncovered(threat))
    monkeypatch.setattr(pp.MaskSet, "uncovered", lambda *_: ())
    for each, falls in ((defense, False), (replace(defense, masks=fewer), True)):
        assert each.certify(image, right).certified.all()
        found = attacked(defended_attacks(each, replace(plan, place_search="gradient")))
        assert found.broken.tolist() == [falls]
    assert found.places[0] in missed or found.places[0][::-1] in missed
    (noise,) = defended_attacks(SimpleNamespace(predict=defense.predict, threat=threat), plan)
    assert [len(place) for place in noise(image, right, generators=[torch.Generator()]).places] == [2]
    three = Patched(image, ((pp.Rect(0, 0, 3, 3),) * 3,), right, right)
    with pytest.raises(CheckError, match="3 patches, the threat is two patches of 3×3 pixels"):
        check_patched(image, three, threat, name="Greedy")


def test_a_fake_unanimous_disagreer_is_found_where_no_majority_can_be():
    true = dark_defense(StartledInTheDark())
    fewer = campaign.without_mask(true.masks, 8)
    broken = campaign.MaskRemoved(true.classifier, fewer, DARK_THREAT, engine=true.engine)
    for defense, falls in ((true, False), (broken, True)):
        assert bool(defense.certify(DARK, RIGHT).certified.all())
        majority, unanimity = (
            attack_in_turn([attack], DARK, RIGHT, seed=0, indices=range(3))
            for attack in defended_attacks(defense, TEETH)
        )
        assert not bool(majority.broken.any())
        assert unanimity.broken.tolist() == [falls] * 3


def test_the_literal_rule_of_the_campaign_is_the_reference_one():
    generator, threat = torch.Generator().manual_seed(8), pp.PatchThreat((6, 5), ((2, 2),))
    masks = pp.covering_masks(threat, per_axis=3)
    for _ in range(20):
        classifier = reference.ExactClassifier((6, 5), 3, generator)
        images = torch.randint(0, 5, (6, 2, 6, 5), generator=generator) / 4
        table = pp.two_mask_labels(classifier, images, masks).tolist()
        expected = [reference.predict_as_printed([t[m][m] for m in range(len(t))], t.__getitem__) for t in table]
        assert campaign.LiteralRule(classifier, masks, threat).predict(images).tolist() == expected
