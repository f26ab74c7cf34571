"""The theorem by brute force, and PatchCleanser against plain-Python references."""

from __future__ import annotations

import hashlib
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

import patchproof as pp
import reference
from patchproof.defenses.patchcleanser import double_masking, majority_label
from patchproof.masking import two_mask_labels

CLEAN, PATCHED, FILL = 0.25, 1.0, 0.5
CLASSES = 3


class Cheater:
    """Answers `label` while the patch is hidden, and once it is visible whatever `scheme` says.

    It reads which pixels are hidden (they have the fill colour) and whether a patch pixel is among the visible ones,
    so it can answer each masked copy as an all-knowing adversary would.
    """

    fill = (FILL,)

    def __init__(self, label: int, scheme):
        self.label, self.scheme = label, scheme

    def __call__(self, images):
        logits = torch.zeros(len(images), CLASSES)
        for logit, image in zip(logits, images[:, 0], strict=True):
            visible = bool((image == PATCHED).any())
            logit[self.scheme(image == FILL) if visible else self.label] = 1.0
        return logits


def random_scheme(seed: int, labels=range(CLASSES)):
    """An arbitrary but fixed label for every set of hidden pixels."""
    labels, cache = list(labels), {}
    generator = torch.Generator().manual_seed(seed)

    def answer(hidden):
        key = hidden.numpy().tobytes()
        if key not in cache:
            cache[key] = labels[int(torch.randint(len(labels), (), generator=generator))]
        return cache[key]

    return answer


def fake_disagreer(masks, decoy: int, wrong: int, label: int):
    """One copy, and every copy of its second round that shows the patch, insists on a wrong label."""
    decoy_hidden = ~masks.keep()[decoy, 0]
    return lambda hidden: wrong if bool((hidden | ~decoy_hidden).all()) else label


def schemes(masks, label):
    wrong = (label + 1) % CLASSES
    yield from (random_scheme(seed) for seed in range(12))
    yield from (random_scheme(seed, (label, wrong)) for seed in range(12))
    yield lambda hidden: wrong
    yield from (fake_disagreer(masks, decoy, wrong, label) for decoy in range(len(masks)))


def attacked_answers(masks, threat, label, scheme):
    """predict(x') for a patch at every position."""
    patches = reference.all_patches(threat.image_size, threat.patch_sizes[0])
    images = torch.full((len(patches), 1, *threat.image_size), CLEAN)
    for image, rect in zip(images, patches, strict=True):
        image[0, rect.top : rect.bottom, rect.left : rect.right] = PATCHED
    return pp.PatchCleanser(Cheater(label, scheme), masks, threat).predict(images)


CASES = [((6, 6), (2, 2), 2), ((5, 7), (2, 3), 3), ((6, 6), (1, 3), 3), ((4, 8), (3, 2), 2)]


@pytest.mark.parametrize(
    ("image_size", "patch", "per_axis"),
    [*CASES[:2], *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES[2:])],
)
def test_no_patch_anywhere_changes_the_answer_on_a_certified_image(image_size, patch, per_axis):
    threat = pp.PatchThreat(image_size, (patch,))
    masks = pp.covering_masks(threat, per_axis=per_axis)
    label = 1
    for scheme in schemes(masks, label):
        defense = pp.PatchCleanser(Cheater(label, scheme), masks, threat)
        clean = torch.full((1, 1, *image_size), CLEAN)
        assert defense.certify(clean, torch.tensor([label])).certified.all()
        assert (attacked_answers(masks, threat, label, scheme) == label).all()


class Whim:
    """Answers each picture by chance, but always the same: mostly 0, and mostly something else once it sees white."""

    fill = (FILL,)

    def __init__(self, seed):
        self.seed = seed

    def __call__(self, images):
        return torch.stack([functional.one_hot(torch.tensor(self.label(image)), 3).float() for image in images])

    def label(self, image):
        luck, other = hashlib.sha256(f"{self.seed} {image.tolist()}".encode()).digest()[:2]
        wrong = luck < (200 if bool((image == 1).any()) else 12)
        return 1 + other % 2 if wrong else 0


def test_what_is_certified_of_a_whimsical_classifier_holds_and_what_is_not_often_falls():
    threat = pp.PatchThreat((6, 6), ((2, 2),))
    masks = pp.covering_masks(threat, per_axis=2)
    fell = {True: 0, False: 0}
    seen = {True: 0, False: 0}
    for seed in range(60):
        defense = pp.PatchCleanser(Whim(seed), masks, threat)
        clean = torch.rand(1, 1, 6, 6, generator=torch.Generator().manual_seed(seed)) * 0.9
        certified = bool(defense.certify(clean, torch.tensor([0])).certified)
        patched = clean.repeat(25, 1, 1, 1)
        for row, (top, left) in enumerate(itertools.product(range(5), repeat=2)):
            patched[row, :, top : top + 2, left : left + 2] = 1
        seen[certified] += 1
        fell[certified] += bool((defense.predict(patched) != 0).any())
    assert fell[True] == 0
    assert min(seen.values()) > 10
    assert fell[False] > 10


@pytest.mark.parametrize(("image_size", "patch", "per_axis"), CASES)
def test_the_theorem_fails_once_a_mask_is_dropped(image_size, patch, per_axis, monkeypatch):
    threat = pp.PatchThreat(image_size, (patch,))
    masks = pp.covering_masks(threat, per_axis=per_axis)
    holed = pp.MaskSet(image_size, masks.rects[1:])
    with pytest.raises(ValueError, match=r"masks do not cover the threat: .* hidden by no mask, e\.g\. Rect"):
        pp.PatchCleanser(Cheater(1, None), holed, threat)
    monkeypatch.setattr(pp.PatchCleanser, "__post_init__", lambda self: None)
    answers = [attacked_answers(holed, threat, 1, scheme) for scheme in schemes(holed, 1)]
    assert (torch.cat(answers) != 1).any()


def abstract_games(seed: int, count: int, n: int = 6):
    """Certified images as bare tables: one or two masks hide the patch, so their rows and columns say y = 0.

    The rest is the adversary's, who mostly bets on label 1.
    """
    generator = torch.Generator().manual_seed(seed)
    table = torch.randint(CLASSES, (count, n, n), generator=generator)
    table[torch.rand(table.shape, generator=generator) < 0.7] = 1
    table = torch.triu(table) + torch.triu(table, 1).transpose(1, 2)
    for rows in (torch.arange(count), torch.arange(0, count, 2)):
        hiding = torch.randint(n, (len(rows),), generator=generator)
        table[rows, hiding] = 0
        table[rows, :, hiding] = 0
    return table


def test_the_rule_is_sound_against_an_abstract_adversary_and_the_printed_one_is_not():
    table = abstract_games(seed=3, count=20_000)
    first = torch.diagonal(table, dim1=1, dim2=2)
    assert (double_masking(first, lambda image, mask: table[image, mask]) == 0).all()
    printed = [
        reference.predict_as_printed(f, lambda m, t=t: t[m])
        for f, t in zip(first.tolist(), table.tolist(), strict=True)
    ]
    assert sum(answer != 0 for answer in printed) > 100


@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(1, 5))
def test_double_masking_equals_the_reference_on_any_table(seed, n, classes):
    generator = torch.Generator().manual_seed(seed)
    table = torch.randint(classes, (20, n, n), generator=generator)
    first = torch.diagonal(table, dim1=1, dim2=2)
    expected = [reference.predict(f, lambda m, t=t: t[m]) for f, t in zip(first.tolist(), table.tolist(), strict=True)]
    assert double_masking(first, lambda image, mask: table[image, mask]).tolist() == expected


def test_the_majority_tie_goes_to_the_smallest_label():
    assert majority_label(torch.tensor([[2, 1, 1, 2], [0, 0, 3, 1], [4, 3, 2, 1]])).tolist() == [1, 0, 1]


def random_case(seed: int):
    generator = torch.Generator().manual_seed(seed)
    size = tuple(torch.randint(5, 9, (2,), generator=generator).tolist())
    patch = tuple(torch.randint(1, 4, (2,), generator=generator).tolist())
    threat = pp.PatchThreat(size, (patch,))
    masks = pp.covering_masks(threat, per_axis=int(torch.randint(1, 4, (), generator=generator)))
    classifier = reference.ExactClassifier(size, 3, generator)
    images = torch.randint(0, 5, (6, 2, *size), generator=generator) / 4
    # Labels that often hold, so that both verdicts occur.
    labels = classifier(images).argmax(dim=1)
    labels[0] = (labels[0] + 1) % 3
    return classifier, threat, masks, images, labels


@given(st.integers(0, 2**32), st.booleans(), st.integers(1, 50), st.sampled_from([0.0, 0.25, 2.0]))
def test_certify_equals_the_reference_exactly(seed, exhaustive, chunk, tau):
    classifier, threat, masks, images, labels = random_case(seed)
    engine = pp.Engine(chunk=chunk, tau_fp32=tau)
    found = pp.PatchCleanser(classifier, masks, threat, engine=engine, exhaustive=exhaustive).certify(images, labels)
    for row, (image, label) in enumerate(zip(images, labels.tolist(), strict=True)):
        table = reference.two_mask_logits(classifier, image, masks)
        certified, margin = reference.certify(table, label, tau=tau)
        assert bool(found.certified[row]) == certified
        a, b = found.witness[row].tolist()
        assert reference.margin_of(table[a][b], label) == float(found.margin[row])
        assert reference.argmax(table[a][b]) == int(found.witness_label[row])
        if certified or exhaustive:
            assert float(found.margin[row]) == margin
        else:
            assert reference.argmax(table[a][b]) != label or float(found.margin[row]) < tau


@given(st.integers(0, 2**32), st.integers(1, 50))
def test_lazy_and_table_driven_predictions_equal_the_reference(seed, chunk):
    classifier, threat, masks, images, labels = random_case(seed)
    defense = pp.PatchCleanser(classifier, masks, threat, engine=pp.Engine(chunk=chunk))
    table = two_mask_labels(classifier, images, masks)
    first = torch.diagonal(table, dim1=1, dim2=2)
    from_table = double_masking(first, lambda image, mask: table[image, mask])
    expected = [reference.predict(f, lambda m, t=t: t[m]) for f, t in zip(first.tolist(), table.tolist(), strict=True)]
    assert defense.predict(images).tolist() == from_table.tolist() == expected
    assessment = defense.assess(images, labels)
    assert assessment.predictions.tolist() == expected
    assert assessment.certificates.certified.tolist() == defense.certify(images, labels).certified.tolist()
    assert assessment.unanimous.tolist() == [len(set(f)) == 1 for f in first.tolist()]


@given(st.integers(0, 2**32))
def test_an_unlabelled_image_is_certified_for_its_own_prediction(seed):
    classifier, threat, masks, images, _ = random_case(seed)
    defense = pp.PatchCleanser(classifier, masks, threat)
    alone = defense.assess(images)
    labelled = defense.certify(images, alone.predictions)
    assert alone.certificates.certified.tolist() == labelled.certified.tolist()
    certified = alone.certificates.certified
    assert torch.equal(alone.certificates.margin[certified], labelled.margin[certified])


@given(st.integers(0, 2**32))
def test_every_pass_is_counted_and_no_union_of_masks_is_evaluated_twice(seed):
    classifier, threat, masks, images, labels = random_case(seed)
    seen: list[bytes] = []

    class Recorder:
        fill = classifier.fill

        def __call__(self, batch):
            seen.extend(image.numpy().tobytes() for image in batch)
            return classifier(batch)

    defense = pp.PatchCleanser(Recorder(), masks, threat)
    for image, label in zip(images + torch.rand(images.shape, generator=torch.Generator()), labels, strict=True):
        seen.clear()
        found = defense.assess(image[None], label[None]).certificates
        assert len(seen) == len(set(seen)) == int(found.forwards)
        assert len(seen) == len(masks.unions) or not found.certified


def test_an_image_is_given_up_at_its_first_wrong_label():
    threat = pp.PatchThreat.square(image_size=(24, 24), pixels=3)
    masks = pp.covering_masks(threat, per_axis=6)
    never_right = pp.PatchCleanser(lambda x: torch.tensor([[1.0, 0.0]]).expand(len(x), -1), masks, threat)
    found = never_right.certify(torch.zeros(2, 3, 24, 24), torch.tensor([1, 0]))
    assert found.certified.tolist() == [False, True]
    assert found.forwards[0] < 10
    assert found.forwards[1] == 666


def test_cost_and_verdict_do_not_depend_on_the_rest_of_the_batch():
    classifier, threat, masks, images, labels = random_case(5)
    defense = pp.PatchCleanser(classifier, masks, threat)
    together = defense.assess(images, labels).certificates
    for row in range(len(images)):
        alone = defense.assess(images[row : row + 1], labels[row : row + 1]).certificates
        for name in ("certified", "margin", "forwards", "witness"):
            assert torch.equal(getattr(alone, name)[0], getattr(together, name)[row])


def test_a_nan_under_a_mask_stays_hidden_and_a_visible_one_certifies_nothing():
    threat = pp.PatchThreat.square(image_size=(6, 6), pixels=2)
    masks = pp.covering_masks(threat, per_axis=2)
    images = torch.full((1, 1, 6, 6), 0.25)
    images[0, 0, 0, 0] = torch.nan
    found = pp.PatchCleanser(lambda x: torch.stack([x.sum((1, 2, 3)), -x.sum((1, 2, 3))], 1), masks, threat)
    assert not found.certify(images, torch.tensor([0])).certified.any()
    hidden = two_mask_labels(lambda x: torch.stack([x.sum((1, 2, 3)), -x.sum((1, 2, 3))], 1), images, masks)
    assert hidden[0, 0, 0] == 0


def test_a_tie_is_no_lead():
    threat = pp.PatchThreat.square(image_size=(6, 6), pixels=2)
    undecided = pp.PatchCleanser(lambda x: torch.zeros(len(x), 2), pp.covering_masks(threat, per_axis=2), threat)
    assert not undecided.certify(torch.zeros(1, 1, 6, 6), torch.tensor([0])).certified.any()


def test_a_union_named_twice_in_one_call_is_evaluated_once():
    masks = pp.MaskSet((1, 8), (pp.Rect(0, 0, 1, 4), pp.Rect(0, 4, 1, 4), pp.Rect(0, 2, 1, 6)))
    seen: list[bytes] = []

    def classifier(images):
        seen.extend(image.numpy().tobytes() for image in images)
        return torch.stack([images.sum((1, 2, 3)), 4.4 - images.sum((1, 2, 3))], 1)

    threat = pp.PatchThreat((1, 8), ((1, 1),))
    pp.PatchCleanser(classifier, masks, threat).predict(torch.linspace(0, 1, 8).view(1, 1, 1, 8))
    assert len(seen) == len(set(seen))


def test_labels_that_are_no_output_are_refused():
    threat = pp.PatchThreat.square(image_size=(8, 8), pixels=2)
    defense = pp.PatchCleanser(lambda x: x.flatten(1)[:, :3], pp.covering_masks(threat, per_axis=2), threat)
    with pytest.raises(ValueError, match="labels run from -1 to 3, but the classifier has the outputs 0 to 2"):
        defense.certify(torch.rand(2, 1, 8, 8), torch.tensor([-1, 3]))


def test_a_fast_precision_without_a_measured_tau_is_refused():
    threat = pp.PatchThreat.square(image_size=(8, 8), pixels=2)
    with pytest.raises(ValueError, match="bf16 labels need a measured τ"):
        pp.PatchCleanser(lambda x: x, pp.covering_masks(threat, per_axis=2), threat, engine=pp.Engine(precision="bf16"))


def test_images_of_another_size_are_refused():
    threat = pp.PatchThreat.square(image_size=(8, 8), pixels=2)
    defense = pp.PatchCleanser(lambda x: x.flatten(1), pp.covering_masks(threat, per_axis=2), threat)
    with pytest.raises(ValueError, match=r"the images are \(6, 6\), the masks are for \(8, 8\)"):
        defense.predict(torch.zeros(1, 1, 6, 6))


def test_an_empty_batch_has_an_empty_answer():
    threat = pp.PatchThreat.square(image_size=(8, 8), pixels=2)
    defense = pp.PatchCleanser(lambda x: x.flatten(1), pp.covering_masks(threat, per_axis=2), threat)
    assert defense.predict(torch.zeros(0, 1, 8, 8)).tolist() == []
    assert defense.certify(torch.zeros(0, 1, 8, 8), torch.zeros(0, dtype=torch.int64)).certified.tolist() == []
