"""Attacks: what the base class refuses, that the search finds what there is to find, and that it has teeth."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
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
    WrongMajority,
    attack_in_turn,
    defended_attacks,
    image_generator,
    undefended_attacks,
)
from patchproof.attacks.places import all_places, as_rects, best_places, grid_places, hidden_by, inside, mass_inside
from patchproof.data import default_preprocessing, iterate_batches, open_dataset, spread_indices
from patchproof.evaluation import attack_batch, evaluate_batch
from patchproof.masking import as_images
from patchproof.models import load_classifier
from patchproof.records import Record
from patchproof.training import Plan
from patchproof.training.loop import Trainer, TrainingData
from patchproof.types import CheckError, InputError


def load_campaign():
    path = Path(__file__).parents[1] / "scripts" / "campaign.py"
    spec = importlib.util.spec_from_file_location("campaign", path)
    module = sys.modules["campaign"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


campaign = load_campaign()


def generators(count: int) -> list[torch.Generator]:
    return [image_generator(0, index) for index in range(count)]


# --- the base class ------------------------------------------------------------------------------------------------

THREAT = pp.PatchThreat((8, 10), ((3, 2), (2, 4)))
PLACE = pp.Rect(1, 1, 3, 2)


class Plugin(Attack):
    """Changes the pixels of `change`, to `value`, and claims the patch is at `place`."""

    def __init__(self, change=PLACE, place=PLACE, value=1.0, then=lambda images: images):
        super().__init__(Undefended(lambda images: images.flatten(1)[:, :3]), THREAT)
        self.change, self.place, self.value, self.then = change, place, value, then

    def search(self, images, labels, generators):
        r = self.change
        images[:, :, r.top : r.bottom, r.left : r.right] = self.value
        patched = self.then(images)
        count = torch.zeros(len(patched), dtype=torch.int64)
        return Patched(patched, (self.place,) * len(images), count, count)


def call(attack: Attack, count: int = 2):
    images = torch.full((count, 1, 8, 10), 0.25)
    return attack(images, torch.zeros(count, dtype=torch.int64), generators=generators(count))


@pytest.mark.parametrize("place", [pp.Rect(0, 0, 3, 2), pp.Rect(5, 8, 3, 2), pp.Rect(6, 6, 2, 4)])
def test_one_patch_of_the_threat_anywhere_inside_the_image_is_allowed(place):
    found = call(Plugin(place, place))
    assert found.places == (place, place)
    assert bool((found.images[:, :, place.top : place.bottom, place.left : place.right] == 1).all())
    assert found.queries.tolist() == [1, 1]


CHEATS = {
    "a pixel outside": ({"change": pp.Rect(1, 1, 3, 3)}, "3 pixels outside .* were changed, e.g. row 1, column 3"),
    "two patches": (
        {"then": lambda x: x.index_fill(3, torch.tensor([9]), 0.5)},
        "8 pixels outside .* were changed, e.g. row 0, column 9",
    ),
    "a larger patch": ({"change": pp.Rect(1, 1, 3, 4), "place": pp.Rect(1, 1, 3, 4)}, "a patch of 3×4 .* 3×2 or 2×4"),
    "a turned patch": ({"change": pp.Rect(1, 1, 2, 3), "place": pp.Rect(1, 1, 2, 3)}, "a patch of 2×3 pixels"),
    "a patch over the rim": ({"change": pp.Rect(6, 1, 2, 2), "place": pp.Rect(6, 1, 3, 2)}, "not inside the image"),
    "a negative place": ({"change": pp.Rect(0, 0, 2, 2), "place": pp.Rect(-1, 0, 3, 2)}, "not inside the image"),
    "too bright": ({"value": 1.5}, r"pixels in \[0.25, 1.5\]"),
    "too dark": ({"value": -0.01}, r"pixels in \[-0.01, 0.25\]"),
    "NaN": ({"value": torch.nan}, "NaN or infinite"),
    "infinite": ({"value": torch.inf}, "NaN or infinite"),
    "another type": ({"then": lambda x: x.double()}, "float64 .* for images of torch.float32"),
    "another shape": ({"then": lambda x: x[:, :, :7]}, r"shape \(2, 1, 7, 10\) for images of shape \(2, 1, 8, 10\)"),
    "fewer images": ({"then": lambda x: x[:1]}, "passes and queries in 2 whole numbers"),
}


@pytest.mark.parametrize("name", CHEATS)
def test_a_plugin_that_breaks_the_rules_is_refused(name):
    arguments, message = CHEATS[name]
    with pytest.raises(CheckError, match=f"Plugin.*{message}"):
        call(Plugin(**arguments))


def test_moving_the_original_does_not_hide_a_change():
    """A plug-in that brightens the very tensor it was given gains nothing: it was given a copy."""
    everywhere = Plugin(change=pp.Rect(0, 0, 8, 10))
    with pytest.raises(CheckError, match="74 pixels outside"):
        call(everywhere)


def test_the_answer_is_the_targets_even_if_the_plugin_keeps_hold_of_its_images():
    kept = []
    found = call(Plugin(change=pp.Rect(0, 0, 3, 2), place=pp.Rect(0, 0, 3, 2), then=lambda x: kept.append(x) or x))
    kept[0].zero_()
    assert bool((found.images[:, :, :3, :2] == 1).all())


def test_a_missing_place_is_refused():
    class Placeless(Plugin):
        def search(self, images, labels, generators):
            count = torch.zeros(len(images), dtype=torch.int64)
            return Patched(images, (PLACE,), count, count)

    with pytest.raises(CheckError, match="Placeless names 1 places for 2 images"):
        call(Placeless())


def test_the_check_cannot_be_replaced():
    with pytest.raises(TypeError, match="must not replace __call__"):
        type("Sly", (Plugin,), {"__call__": lambda self, *a, **k: None})
    with pytest.raises(TypeError, match="must not replace __call__"):
        type("Sly", (type("Mixin", (), {"__call__": lambda self, *a, **k: None}), Plugin), {})


class Given(Plugin):
    """Returns what it is given, whatever that is."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def search(self, images, labels, generators):
        return self.make(self, images, torch.zeros(len(images), dtype=torch.int64))


class TwoFaced:
    """Clean when it is looked at first, white afterwards."""

    def __init__(self, images, count):
        self.looks, self.clean, self.places, self.passes, self.queries = 0, images, (PLACE,) * len(images), count, count

    @property
    def images(self):
        self.looks += 1
        return self.clean if self.looks == 1 else torch.ones_like(self.clean)


class Wide(pp.Rect):
    right = 10
    bottom = 8


class Lying(torch.Tensor):
    """Says that it equals everything."""

    def __ne__(self, other):
        return torch.zeros(self.shape, dtype=torch.bool)

    __hash__ = torch.Tensor.__hash__


def raise_the_threat(attack, images, count):
    attack.threat = pp.PatchThreat((8, 10), ((8, 10),))
    return Patched(torch.ones_like(images), (pp.Rect(0, 0, 8, 10),) * len(images), count, count)


HALF = SimpleNamespace(top=1.5, left=1, height=3, width=2)
SLY = {
    "another threat": (raise_the_threat, "a patch of 8×10 pixels, allowed is"),
    "a wider place": (
        lambda _, images, count: Patched(torch.ones_like(images), (Wide(1, 1, 3, 2),) * 2, count, count),
        "74 pixels outside",
    ),
    "pixels that lie": (
        lambda _, images, count: Patched(torch.ones_like(images).as_subclass(Lying), (PLACE,) * 2, count, count),
        "a plain dense tensor is expected, not a Lying",
    ),
    "nothing": (lambda *_: None, "no proposal"),
    "no places": (lambda _, images, count: Patched(images, None, count, count), "no proposal"),
    "half a place": (lambda _, images, count: Patched(images, (HALF,) * 2, count, count), "no prop"),
    "no counts": (lambda _, images, count: Patched(images, (PLACE,) * 2, None, count), "no proposal"),
    "negative counts": (lambda _, images, count: Patched(images, (PLACE,) * 2, count - 1, count), "at least 0"),
    "one count": (lambda _, images, count: Patched(images, (PLACE,) * 2, count, count.sum()), "2 whole numbers"),
    "sparse images": (lambda _, images, count: Patched(images.to_sparse(), (PLACE,) * 2, count, count), "no proposal"),
}


@pytest.mark.parametrize("name", SLY)
def test_whatever_a_plugin_returns_is_copied_and_checked(name):
    make, message = SLY[name]

    def unchecked(*arguments):  # the tests' own shape checks would stop some of these first
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Patched, "__init__", plain_init)
            return make(*arguments)

    with pytest.raises(CheckError, match=f"Given.*{message}"):
        call(Given(unchecked))


def plain_init(self, *values):
    for name, value in zip(("images", "places", "passes", "queries"), values, strict=True):
        object.__setattr__(self, name, value)


def test_what_was_checked_is_what_is_asked():
    found = call(Given(lambda _, images, count: TwoFaced(images, count)))
    assert bool((found.images == 0.25).all())


def test_the_target_of_before_the_search_answers_and_cannot_move_the_images():
    class Vandal:
        def predict(self, images):
            images.fill_(1)
            return torch.zeros(len(images), dtype=torch.int64)

    def take_over(attack, images, count):
        attack.target = Undefended(lambda images: images.flatten(1)[:, :3] * torch.nan)
        return Patched(images, (PLACE,) * len(images), count, count)

    attack = Given(take_over)
    attack.target = Vandal()
    found = call(attack)
    assert not bool(found.broken.any())
    assert bool((found.images == 0.25).all())
    images = torch.full((2, 1, 8, 10), 0.25)
    attack = Plugin()
    attack.target = Vandal()
    attack_in_turn([attack], images, torch.zeros(2, dtype=torch.int64), seed=0, indices=[0, 1])
    assert bool((images == 0.25).all())


def test_answers_of_another_shape_are_refused():
    attack = Plugin()
    attack.target = SimpleNamespace(predict=lambda images: torch.tensor(0))
    with pytest.raises(CheckError, match=r"predict returned shape \(\) for 2 images"):
        call(attack)


def test_a_check_replaced_later_is_not_the_one_that_is_used(monkeypatch):
    class Sly(Plugin):
        pass

    monkeypatch.setattr(Sly, "__call__", lambda *_, **__: pytest.fail("this one was used"))
    images, labels = torch.full((1, 1, 8, 10), 0.25), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(CheckError, match="74 pixels outside"):
        attack_in_turn([Sly(change=pp.Rect(0, 0, 8, 10))], images, labels, seed=0, indices=[0])


def test_wrong_images_and_generators_are_named():
    with pytest.raises(InputError, match=r"the images are \(7, 7\), the threat is for \(8, 10\)"):
        Plugin()(torch.zeros(1, 1, 7, 7), torch.tensor([0]), generators=generators(1))
    with pytest.raises(InputError, match=r"images must be in \[0, 1\]"):
        Plugin()(torch.full((1, 1, 8, 10), 255.0), torch.tensor([0]), generators=generators(1))
    with pytest.raises(InputError, match="2 images need as many generators, not 1"):
        Plugin()(torch.zeros(2, 1, 8, 10), torch.tensor([0, 0]), generators=generators(1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "at least 1 of its steps, not 0"),
        ({"restarts": -1}, "at least 1 of its restarts"),
        ({"places": 0}, "at least 1 of its places"),
        ({"step_size": 0.0}, "step size must be in"),
        ({"step_size": float("nan")}, "step size must be in"),
    ],
)
def test_an_impossible_plan_is_refused(change, message):
    with pytest.raises(InputError, match=message):
        AttackPlan(**change)


def test_an_objective_about_masks_needs_masks_and_a_gradient():
    target = Undefended(lambda images: images.flatten(1))
    with pytest.raises(InputError, match="WrongMajority looks through masks"):
        GradientAttack(target.classifier, target, THREAT, WrongMajority())
    weight = torch.ones(80, 3, requires_grad=True)
    for blind in (lambda images: images.detach().flatten(1), lambda images: images.detach().flatten(1) @ weight):
        with pytest.raises(InputError, match="passes no gradient"):
            call(GradientAttack(blind, Undefended(blind), THREAT, Misclassify()))


# --- places --------------------------------------------------------------------------------------------------------


def test_exhaustive_places_are_those_of_a_loop():
    expected = [r for size in THREAT.patch_sizes for r in reference.all_patches(THREAT.image_size, size)]
    assert list(as_rects(all_places(THREAT))) == expected


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 16, 1000])
def test_a_grid_has_at_most_so_many_different_places_of_every_size_it_has_room_for(count):
    found = as_rects(grid_places(THREAT, count))
    assert len(set(found)) == len(found) <= count
    assert set(found) <= set(as_rects(all_places(THREAT)))
    assert len(found) >= min(count, 9)
    if count > 1:
        assert {(r.height, r.width) for r in found} == set(THREAT.patch_sizes)


def test_gradient_mass_and_hiding_equal_loops(generator):
    maps = torch.rand(3, 8, 10, generator=generator, dtype=torch.float64)
    places = all_places(THREAT)
    masks = pp.covering_masks(THREAT, per_axis=3)
    mass, hides, pixels = mass_inside(maps, places), hidden_by(places, masks), inside(places, THREAT, "cpu")
    for p, r in enumerate(as_rects(places)):
        expected = maps[:, r.top : r.bottom, r.left : r.right].sum(dim=(1, 2))
        assert torch.allclose(mass[:, p], expected)
        assert hides[p].tolist() == [mask.contains(r) for mask in masks.rects]
        assert int(pixels[p].sum()) == r.height * r.width
        assert bool(pixels[p, 0, r.top : r.bottom, r.left : r.right].all())


def reference_best(score: list[float], places: list[pp.Rect], count: int) -> list[int]:
    """One by one: the best place that is not close to a chosen one; when all are, the best of those left."""

    def close(a, b):
        same = (a.height, a.width) == (b.height, b.width)
        return same and 2 * abs(a.top - b.top) < a.height and 2 * abs(a.left - b.left) < a.width

    chosen: list[int] = []
    while len(chosen) < min(count, len(places)):
        left = [p for p in range(len(places)) if p not in chosen]
        free = [p for p in left if not any(close(places[c], places[p]) for c in chosen)]
        chosen.append(max(free or left, key=lambda p: (score[p], -p)))
    return chosen


@pytest.mark.parametrize("count", [1, 5, 40, 500])
def test_the_best_places_keep_their_distance_while_there_is_room(generator, count):
    threat = pp.PatchThreat((7, 6), ((3, 3), (2, 4)))
    places = all_places(threat)
    score = torch.randint(0, 6, (4, len(places)), generator=generator).double()
    found = best_places(score, places, count)
    for row in range(4):
        assert found[row].tolist() == reference_best(score[row].tolist(), list(as_rects(places)), count)


# --- the search finds what there is --------------------------------------------------------------------------------


def linear_case(seed: int):
    """A linear classifier: the best patch is a corner of the cube, so brute force over 0 and 1 is exact."""
    generator = torch.Generator().manual_seed(seed)
    threat = pp.PatchThreat((4, 4), ((2, 2),))
    classifier = reference.ExactClassifier((4, 4), 3, generator, channels=1)
    images = torch.randint(0, 5, (8, 1, 4, 4), generator=generator) / 4
    labels = classifier(images).argmax(dim=1)
    return threat, classifier, images, labels


def all_patched(image, threat):
    contents = torch.tensor(list(itertools.product([0.0, 1.0], repeat=4))).view(-1, 1, 2, 2)
    for r in reference.all_patches(threat.image_size, threat.patch_sizes[0]):
        patched = image.repeat(len(contents), 1, 1, 1)
        patched[:, :, r.top : r.bottom, r.left : r.right] = contents
        yield patched


@pytest.mark.parametrize("seed", range(4))
def test_exhaustive_margin_attack_breaks_exactly_what_brute_force_breaks(seed):
    threat, classifier, images, labels = linear_case(seed)
    target, plan = Undefended(classifier), AttackPlan(steps=12, restarts=1, step_size=0.3, search="exhaustive")
    attack = GradientAttack(classifier, target, threat, Misclassify("margin"), plan=plan)
    found = attack(images, labels, generators=generators(len(images)))
    expected = [
        any(bool((target.predict(p) != label).any()) for p in all_patched(image, threat))
        for image, label in zip(images, labels, strict=True)
    ]
    assert found.broken.tolist() == expected
    assert any(expected)


@pytest.mark.parametrize("cases", [3, pytest.param(9, marks=pytest.mark.slow)])
def test_adaptive_attacks_break_nearly_all_that_brute_force_breaks(cases):
    """Against the whole defence: every place, every black-and-white patch, judged by predict."""
    brute, attacked = set(), set()
    for seed in range(cases):
        threat, classifier, images, labels = linear_case(seed)
        masks = pp.covering_masks(threat, per_axis=2)
        defense = pp.PatchCleanser(classifier, masks, threat, engine=pp.Engine(chunk=512))
        labels = defense.predict(images)
        certified = defense.certify(images, labels).certified
        plan = AttackPlan(steps=12, restarts=2, step_size=0.3, search="exhaustive")
        attacks = defended_attacks(classifier, defense, threat, masks, plan=plan, engine=pp.Engine(chunk=512))
        found = attack_in_turn(attacks, images, labels, seed=seed, indices=range(len(images)))
        assert not bool((found.broken & certified).any())
        for row, image in enumerate(images):
            if any(bool((defense.predict(p) != labels[row]).any()) for p in all_patched(image, threat)):
                brute.add((seed, row))
            if found.broken[row]:
                attacked.add((seed, row))
    assert len(brute) >= {3: 4, 9: 14}[cases]
    assert len(attacked & brute) >= 0.9 * len(brute)


@pytest.mark.parametrize("search", ["gradient", pytest.param("grid", marks=pytest.mark.slow)])
def test_what_is_found_does_not_depend_on_the_batch_or_its_order(search):
    generator = torch.Generator().manual_seed(4)
    threat = pp.PatchThreat((9, 8), ((3, 3),))
    classifier = reference.Curved((9, 8), 4, generator)
    images = torch.rand(5, 2, 9, 8, generator=generator)
    masks = pp.covering_masks(threat, per_axis=2)
    defense = pp.PatchCleanser(classifier, masks, threat)
    labels = defense.predict(images)
    plan = AttackPlan(steps=6, restarts=3, places=3, search=search)
    attacks = defended_attacks(classifier, defense, threat, masks, plan=plan)
    indices = [3, 14, 15, 92, 65]
    together = attack_in_turn(attacks, images, labels, seed=1, indices=indices)
    for order in ([4, 2, 0, 3, 1], [2], [0, 4]):
        some = attack_in_turn(attacks, images[order], labels[order], seed=1, indices=[indices[i] for i in order])
        assert torch.allclose(some.images, together.images[order], atol=1e-4)
        assert some.places == tuple(together.places[i] for i in order)
        for name in ("predictions", "passes", "queries"):
            assert torch.equal(getattr(some, name), getattr(together, name)[order]), name


def test_every_seed_image_and_turn_has_a_stream_of_its_own():
    streams = {
        key: torch.rand(4, generator=image_generator(key[0], key[1], turn=key[2])).tolist()
        for key in itertools.product((0, 1, 12), (0, 1, 21), (0, 1))
    }
    assert len({tuple(values) for values in streams.values()}) == len(streams)
    assert torch.rand(4, generator=image_generator(12, 1, turn=0)).tolist() == streams[12, 1, 0]


def test_the_classifier_never_sees_more_copies_than_a_chunk_holds():
    generator = torch.Generator().manual_seed(6)
    threat = pp.PatchThreat((9, 8), ((3, 3),))
    curved, seen = reference.Curved((9, 8), 4, generator), {True: 0, False: 0}

    def classifier(images):
        seen[images.requires_grad] = max(seen[images.requires_grad], len(images))
        return curved(images)

    masks, engine = pp.covering_masks(threat, per_axis=3), pp.Engine(chunk=16)
    defense = pp.PatchCleanser(classifier, masks, threat, engine=engine)
    images = torch.rand(5, 2, 9, 8, generator=generator)
    plan = AttackPlan(steps=2, restarts=2, places=2)
    attacks = defended_attacks(classifier, defense, threat, masks, plan=plan, engine=engine)
    attack_in_turn(attacks, images, defense.predict(images), seed=0, indices=range(5))
    assert seen == {True: 4, False: 16}


def test_images_answered_wrongly_as_they_are_need_no_patch():
    threat, classifier, images, labels = linear_case(0)
    wrong = (labels + 1) % 3
    found = attack_in_turn(undefended_attacks(classifier, threat), images, wrong, seed=0, indices=range(8))
    assert bool(found.broken.all())
    assert torch.equal(found.images, images)
    assert found.passes.tolist() == [0] * 8
    with pytest.raises(InputError, match="no attack to run"):
        attack_in_turn([], images, labels, seed=0, indices=range(8))


# --- teeth ---------------------------------------------------------------------------------------------------------


class Startled:
    """Answers 0 unless bright pixels are visible; a clean, dark image is certified, and one bright patch upsets F."""

    fill = (0.2,)

    def __call__(self, images):
        bright = functional.softplus(20 * (images - 0.6)).sum(dim=(1, 2, 3)) / 20
        return torch.stack([torch.full_like(bright, 0.5), bright], dim=1)


class StartledInTheDark(Startled):
    """As above, but only while the pixel in the corner is hidden; otherwise bright pixels reassure it.

    So a majority pulls the patch to the dark, and only the row of copies that hides the corner can be turned.
    """

    def __call__(self, images):
        logits = super().__call__(images)
        hidden = (images[:, 0, 0, 0] == self.fill[0]).float()
        return torch.stack([logits[:, 0], logits[:, 1] * (4 * hidden - 3)], dim=1)


def dark_batches(count: int = 3):
    pixels = 0.3 + 0.1 * torch.rand(count, 1, 12, 12, generator=torch.Generator().manual_seed(0))
    yield list(range(count)), pixels, torch.zeros(count, dtype=torch.int64)


TEETH = AttackPlan(steps=16, restarts=1, places=6)
# Masks of 6 at 0, 4 and 6: patches that start in row or column 6 or 7 are hidden by two masks.
DARK_THREAT = pp.PatchThreat.square(image_size=(12, 12), pixels=3)
EVERYWHERE = AttackPlan(steps=4, restarts=1, search="exhaustive", step_size=0.3)


def dark_defense(classifier):
    masks = pp.covering_masks(DARK_THREAT, per_axis=3)
    return pp.PatchCleanser(classifier, masks, DARK_THREAT, engine=pp.Engine(chunk=512))


def test_double_masking_holds_where_both_broken_defences_fall():
    true = dark_defense(Startled())
    held = campaign.attack_certified(true, dark_batches(2), plan=EVERYWHERE)
    assert (held.tried, held.broken) == (2, 0)
    for name, broken in campaign.broken_defenses(true).items():
        fallen = campaign.attack_certified(broken, dark_batches(2), plan=EVERYWHERE)
        assert (fallen.tried, fallen.broken) == (2, 2), name
        assert fallen.queries < 0.9 * held.queries, "broken images are left alone"


@pytest.mark.parametrize("number", range(9))
def test_whichever_mask_is_removed_the_attack_goes_where_it_was(number):
    """Without any hint but the mask set: the guided search tries six of a hundred places."""
    true = dark_defense(Startled())
    fewer = campaign.without_mask(true.masks, number)
    broken = campaign.MaskRemoved(true.classifier, fewer, DARK_THREAT, engine=true.engine)
    fallen = campaign.attack_certified(broken, dark_batches(), plan=TEETH)
    assert (fallen.tried, fallen.broken) == (3, 3)
    uncovered = set(fewer.uncovered(DARK_THREAT))
    assert all(pp.Rect(*b["place"]) in uncovered for b in fallen.breaks)


def test_a_fake_unanimous_disagreer_is_found_where_no_majority_can_be():
    true = dark_defense(StartledInTheDark())
    fewer = campaign.without_mask(true.masks, 8)
    broken = campaign.MaskRemoved(true.classifier, fewer, DARK_THREAT, engine=true.engine)
    indices, images, labels = next(dark_batches())
    for defense, masks, falls in ((true, true.masks, False), (broken, fewer, True)):
        assert bool(defense.certify(images, labels).certified.all())
        attacks = defended_attacks(defense.classifier, defense, DARK_THREAT, masks, plan=TEETH, engine=true.engine)
        majority, unanimity = [attack_in_turn([a], images, labels, seed=0, indices=indices) for a in attacks]
        assert not bool(majority.broken.any())
        assert unanimity.broken.tolist() == [falls] * 3


def test_the_literal_rule_of_the_campaign_is_the_reference_one():
    generator = torch.Generator().manual_seed(8)
    for _ in range(20):
        classifier = reference.ExactClassifier((6, 5), 3, generator)
        threat = pp.PatchThreat((6, 5), ((2, 2),))
        masks = pp.covering_masks(threat, per_axis=3)
        images = torch.randint(0, 5, (6, 2, 6, 5), generator=generator) / 4
        table = pp.two_mask_labels(classifier, images, masks).tolist()
        expected = [reference.predict_as_printed([t[m][m] for m in range(len(t))], lambda m, t=t: t[m]) for t in table]
        assert campaign.LiteralRule(classifier, masks, threat).predict(images).tolist() == expected


# --- a real network on real images ---------------------------------------------------------------------------------


class Noise(Attack):
    """Random patches at random places, as many as asked for: what an attack must beat."""

    def __init__(self, target, threat, tries):
        super().__init__(target, threat)
        self.places, self.tries = all_places(threat), tries

    def search(self, images, labels, generators):
        best, chosen = images.clone(), [pp.Rect(0, 0, *self.threat.patch_sizes[0])] * len(images)
        for row, generator in enumerate(generators):
            for _ in range(self.tries):
                place = as_rects(self.places[torch.randint(len(self.places), (1,), generator=generator)])[0]
                patched = images[row].clone()
                noise = torch.rand(3, place.height, place.width, generator=generator)
                patched[:, place.top : place.bottom, place.left : place.right] = noise
                if bool(self.target.predict(patched[None]) != labels[row]):
                    best[row], chosen[row] = patched, place
                    break
        count = torch.zeros(len(images), dtype=torch.int64)
        return Patched(best, tuple(chosen), count, count)


@pytest.fixture(scope="module")
def trained():
    """`small` after a few seconds on masked Fashion-MNIST, with test images it answers."""
    source = open_dataset("fashion-mini", split="train")
    classifier = load_classifier("small", "random", class_names=source.class_names, seed=0)
    preprocessing = default_preprocessing(
        source.low_resolution, classifier.input_size, interpolation=classifier.interpolation, crop_pct=1.0
    )
    data = TrainingData(source, spread_indices(source, 640), torch.arange(10), preprocessing)
    plan = Plan(strategy="rand3x3", epochs=3, batch_size=32, learning_rate=0.1)
    for _ in Trainer(classifier, data, plan, accelerator=Accelerator(cpu=True)).run():
        pass
    test = open_dataset("fashion-mini")
    batch = next(iterate_batches(test, preprocessing, spread_indices(test, 20), batch_size=20))
    return classifier.eval(), as_images(batch.images, "cpu"), batch.labels, batch.indices


@pytest.fixture(scope="module")
def sandwich(trained):
    classifier, images, labels, indices = trained
    threat = pp.PatchThreat.square(image_size=(28, 28), pixels=4)
    masks = pp.covering_masks(threat, per_axis=3)
    engine, _ = pp.check_classifier(classifier, images, masks, num_classes=10, engine=pp.Engine(chunk=256))
    defense = pp.PatchCleanser(classifier, masks, threat, engine=engine)
    plan = AttackPlan(steps=8, restarts=1, places=2)
    records = evaluate_batch(defense, defense.runner, images, labels, indices=indices, paths=[str(i) for i in indices])
    found, breaks = attack_batch(
        records,
        images,
        labels,
        undefended=undefended_attacks(classifier, threat, plan=plan, engine=engine),
        defended=defended_attacks(classifier, defense, threat, masks, plan=plan, engine=engine),
    )
    return found, breaks, defense


def test_certified_attacked_defended_image_by_image(sandwich):
    found, breaks, _ = sandwich
    assert not breaks
    for record in found:
        assert record.certified <= record.attacked <= record.defended
        assert record.undefended_attacked <= record.undefended
        fell = record.defended and not record.attacked
        assert (record.place is not None, record.attacked_label is not None) == (fell, fell)
    counts = [sum(getattr(r, name) for r in found) for name in ("certified", "attacked", "defended")]
    assert 0 < counts[0] <= counts[1] < counts[2]
    assert sum(r.undefended_attacked for r in found) < sum(r.undefended for r in found)


def test_gradient_patches_break_more_than_random_ones(trained, sandwich):
    classifier, images, labels, indices = trained
    target, threat = Undefended(classifier), sandwich[2].threat
    most_queries = 12
    random = attack_in_turn([Noise(target, threat, most_queries)], images, labels, seed=0, indices=indices)
    fallen = [not record.undefended_attacked for record in sandwich[0]]
    assert sum(fallen) > int(random.broken.sum())


def test_only_certified_leaves_the_others_alone(trained, sandwich):
    _, images, labels, _ = trained
    found, _, defense = sandwich
    plan = AttackPlan(steps=1, restarts=1, places=1)
    attacks = defended_attacks(defense.classifier, defense, defense.threat, defense.masks, plan=plan)
    again, breaks = attack_batch(found_as_records(found), images, labels, defended=attacks, only_certified=True)
    assert not breaks
    assert [r.attacked for r in again] == [True if r.certified else None for r in found]
    assert all(r.undefended_attacked is None for r in again)


def found_as_records(found):
    return [Record(**{f.name: getattr(r, f.name) for f in dataclasses.fields(Record)}) for r in found]
