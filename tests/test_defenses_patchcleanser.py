"""The theorem by brute force, and PatchCleanser against plain-Python references."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import patchproof as pp
import reference
from patchproof.defenses import patchcleanser
from patchproof.defenses.patchcleanser import double_masking
from patchproof.types import InputError
from reference import measured

CASES = [((6, 6), (2, 2), 2), ((5, 7), (2, 3), 3), ((6, 6), (1, 3), 3), ((4, 8), (3, 2), 2)]
TWO_PATCHES = ((3, 5), (2, 2), 2)
THREAT = pp.PatchThreat.square(image_size=(6, 6), pixels=2)
MASKS = pp.covering_masks(THREAT, per_axis=2)


@pytest.mark.parametrize(
    ("image_size", "patch", "per_axis", "patches"),
    [
        (*CASES[0], 1),
        (*TWO_PATCHES, 2),
        *(pytest.param(*case, 1, marks=pytest.mark.slow) for case in CASES[1:]),
        pytest.param((1, 9), (1, 2), (1, 3), 2, marks=pytest.mark.slow),
    ],
)
def test_no_patch_anywhere_changes_the_answer_on_a_certified_image_unless_a_mask_is_dropped(
    image_size, patch, per_axis, patches, monkeypatch
):
    threat = pp.PatchThreat(image_size, (patch,), patches)
    masks, label = pp.covering_masks(threat, per_axis=per_axis), 1
    clean, patched = torch.full((1, 1, *image_size), reference.CLEAN), reference.patched_everywhere(threat)
    for scheme in reference.schemes(masks, label):
        defense = pp.PatchCleanser(reference.Adversary(label, scheme), masks, threat, engine=measured())
        assert defense.certify(clean, torch.tensor([label])).certified.all()
        assert (defense.predict(patched) == label).all()

    holed = pp.MaskSet(image_size, masks.rects[1:] if patches == 1 else masks.rects[:-1])
    missed = r"masks do not cover the threat: \d+ (pairs of )?patch positions are hidden by no mask, e\.g\. \(?Rect"
    with pytest.raises(InputError, match=missed):
        pp.PatchCleanser(reference.Adversary(label, lambda _: 0), holed, threat)
    monkeypatch.setattr(pp.MaskSet, "uncovered", lambda *_: ())
    answers = [
        pp.PatchCleanser(reference.Adversary(label, scheme), holed, threat).predict(patched)
        for scheme in reference.schemes(holed, label)
    ]
    assert (torch.cat(answers) != label).any()


def test_the_rule_is_sound_against_an_abstract_adversary_and_the_printed_one_is_not():
    """Certified images as bare tables: one or two masks hide the patch, so their rows and columns say y = 0. All other
    cells are the adversary's, who mostly bets on label 1."""
    count, n, generator = 20_000, 6, torch.Generator().manual_seed(3)
    table = torch.randint(3, (count, n, n), generator=generator)
    table[torch.rand(table.shape, generator=generator) < 0.7] = 1
    table = torch.triu(table) + torch.triu(table, 1).transpose(1, 2)
    for rows in (torch.arange(count), torch.arange(0, count, 2)):
        hiding = torch.randint(n, (len(rows),), generator=generator)
        table[rows, hiding] = 0
        table[rows, :, hiding] = 0
    first = torch.diagonal(table, dim1=1, dim2=2)
    assert (double_masking(first, lambda image, mask: table[image, mask]) == 0).all()
    games = zip(first.tolist(), table.tolist(), strict=True)
    assert sum(reference.predict_as_printed(f, t.__getitem__) != 0 for f, t in games) > 100


@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(1, 5))
def test_double_masking_equals_the_reference_on_any_table(seed, n, classes):
    table = torch.randint(classes, (20, n, n), generator=torch.Generator().manual_seed(seed))
    first = torch.diagonal(table, dim1=1, dim2=2)
    expected = [reference.predict(f, t.__getitem__) for f, t in zip(first.tolist(), table.tolist(), strict=True)]
    assert double_masking(first, lambda image, mask: table[image, mask]).tolist() == expected


def random_case(seed: int):
    """A classifier with exact arithmetic that may hide pixels its own way, and labels that are mostly right."""
    generator = torch.Generator().manual_seed(seed)
    size = tuple(torch.randint(5, 9, (2,), generator=generator).tolist())
    patch = tuple(torch.randint(1, 4, (2,), generator=generator).tolist())
    threat = pp.PatchThreat(size, (patch,), 1 + (seed % 3 == 0))
    masks = pp.covering_masks(threat, per_axis=int(torch.randint(1, 5 - threat.patches, (), generator=generator)))
    kind = (reference.ExactClassifier, reference.ExactMasking)[seed % 2]
    classifier = kind(size, 3, generator)
    images = torch.randint(0, 5, (4, 2, *size), generator=generator) / 4
    labels = classifier(images).argmax(dim=1)
    labels[0] = (labels[0] + 1) % 3
    return classifier, threat, masks, images, labels


@given(st.integers(0, 2**32), st.booleans(), st.integers(1, 50), st.sampled_from([1e-9, 0.25, 2.0]))
def test_certify_equals_the_reference_exactly(seed, exhaustive, chunk, tau):
    classifier, threat, masks, images, labels = random_case(seed)
    engine = measured(batch_size=chunk, tau_fp32=tau)
    found = pp.PatchCleanser(classifier, masks, threat, engine=engine, exhaustive=exhaustive).certify(images, labels)
    for row, (image, label) in enumerate(zip(images, labels.tolist(), strict=True)):
        table = reference.two_mask_logits(classifier, image, masks)
        certified, margin = reference.certify(table, label, tau=tau)
        assert bool(found.certified[row]) == certified
        a, b = found.evidence["witness.masks"][row].tolist()
        assert reference.margin_of(table[a][b], label) == float(found.margin[row])
        assert reference.argmax(table[a][b]) == int(found.evidence["witness.label"][row])
        if certified or exhaustive:
            assert float(found.margin[row]) == margin
        else:
            assert reference.argmax(table[a][b]) != label or float(found.margin[row]) < max(tau, 1e-9)


def asked_for(first, table) -> int:
    """An upper bound on the passes of Algorithm 1: the second round of each disagreeing copy in full."""
    majority = reference.predict(first, lambda _: [-1])
    return len(first) * (1 + sum(label != majority for label in first))


@given(st.integers(0, 2**32), st.integers(1, 50))
def test_lazy_and_table_driven_predictions_equal_the_reference_with_labels_or_without(seed, chunk):
    classifier, threat, masks, images, labels = random_case(seed)
    defense = pp.PatchCleanser(classifier, masks, threat, engine=measured(batch_size=chunk))
    tables = [reference.two_mask_logits(classifier, image, masks) for image in images]
    table = [[[reference.argmax(cell) for cell in row] for row in image] for image in tables]
    assert pp.two_mask_labels(classifier, images, masks).tolist() == table
    first = [[t[m][m] for m in range(len(masks))] for t in table]
    expected = [reference.predict(f, t.__getitem__) for f, t in zip(first, table, strict=True)]
    assert defense.predict(images).tolist() == expected
    assert defense.evaluator.passes <= sum(asked_for(f, t) for f, t in zip(first, table, strict=True)), "not lazy"
    labelled, alone = defense.assess(images, labels), defense.assess(images)
    assert labelled.predictions.tolist() == alone.predictions.tolist() == expected
    assert labelled.remarks["unanimous"].tolist() == [len(set(f)) == 1 for f in first]
    for found, about in ((labelled, labels), (alone, alone.predictions)):
        proof = defense.certify(images, about)
        assert torch.equal(found.certificates.certified, proof.certified)
        assert torch.equal(found.certificates.margin[proof.certified], proof.margin[proof.certified])


@given(st.integers(0, 2**32))
def test_every_pass_is_counted_and_no_union_of_masks_is_evaluated_twice(seed):
    classifier, threat, masks, images, labels = random_case(2 * seed)
    seen: list[bytes] = []

    class Recorder:
        fill = classifier.fill

        def __call__(self, batch):
            seen.extend(image.numpy().tobytes() for image in batch)
            return classifier(batch)

    defense = pp.PatchCleanser(Recorder(), masks, threat, engine=measured())
    noise = torch.rand(images.shape, generator=torch.Generator())
    for image, label in zip((images + noise) / 2, labels, strict=True):
        seen.clear()
        found = defense.assess(image[None], label[None]).certificates
        assert len(seen) == len(set(seen)) == int(found.forwards)
        assert len(seen) == len(masks.unions) or not found.certified


def test_an_image_is_given_up_at_its_first_wrong_label_independent_of_the_batch():
    threat = pp.PatchThreat.square(image_size=(24, 24), pixels=3)
    masks = pp.covering_masks(threat, per_axis=6)
    engine = measured()
    never_right = pp.PatchCleanser(
        lambda x: torch.tensor([[1.0, 0.0]]).expand(len(x), -1), masks, threat, engine=engine
    )
    found = never_right.certify(torch.zeros(2, 3, 24, 24), torch.tensor([1, 0]))
    assert found.certified.tolist() == [False, True]
    assert found.forwards[0] < 10
    assert found.forwards[1] == 666
    classifier, threat, masks, images, labels = random_case(5)
    defense = pp.PatchCleanser(classifier, masks, threat, engine=engine)
    together = defense.assess(images, labels).certificates
    for row in range(len(images)):
        alone = defense.assess(images[row : row + 1], labels[row : row + 1]).certificates
        for name in ("certified", "margin", "forwards"):
            assert torch.equal(getattr(alone, name)[0], getattr(together, name)[row])


def test_masked_nans_stay_hidden_and_visible_nans_or_ties_certify_nothing():
    def brightness(x):
        x = torch.where(x == 1, torch.nan, x)
        return torch.stack([x.sum((1, 2, 3)), -x.sum((1, 2, 3))], 1)

    images = torch.full((1, 1, 6, 6), 0.25)
    images[0, 0, 0, 0] = 1
    for classifier in (brightness, lambda x: torch.zeros(len(x), 2)):
        defense = pp.PatchCleanser(classifier, MASKS, THREAT, engine=measured(tau_fp32=1e-60))  # 0 in float32
        assert not defense.certify(images, torch.tensor([0])).certified.any()
    assert pp.two_mask_labels(brightness, images, MASKS)[0, 0, 0] == 0
    hidden = pp.occlude(images.where(images < 1, torch.nan), MASKS.keep()[:1], torch.zeros(1, 1, 1))
    assert hidden.isfinite().all(), "whatever is under a mask"


def test_no_tensor_grows_with_masks_times_pairs(monkeypatch):
    """This holds for the second round of many disagreeing copies, and evaluating it in parts changes nothing."""

    class Largest(TorchDispatchMode):
        numbers = 0

        def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
            found = function(*arguments, **(keywords or {}))
            if isinstance(found, torch.Tensor) and not found._is_view():
                self.numbers = max(self.numbers, found.numel())
            return found

    threat = pp.PatchThreat((12, 12), ((1, 1),))
    masks = pp.covering_masks(threat, per_axis=12)
    sign = torch.tensor([1.0, -1.0]).repeat(72)

    def classifier(images):  # half of the pixels speak for each label, so each hidden one changes the majority
        lead = ((images - 0.5).flatten(1) * sign).sum(dim=1) - 0.1
        return torch.stack([torch.zeros_like(lead), lead], dim=1)

    defense = pp.PatchCleanser(classifier, masks, threat, engine=measured(batch_size=8))
    image = torch.full((1, 1, 12, 12), 0.8)
    disagree = len(masks) - int(defense.pairs(image).one_mask_labels().flatten().bincount().amax())
    assert disagree > 10
    with Largest() as largest:
        answer = defense.predict(image)
    assert largest.numbers < 3 * len(masks) ** 2 < disagree * masks.union_count
    monkeypatch.setattr(patchcleanser, "TABLE_CELLS", 2 * len(masks))
    assert defense.predict(image).equal(answer)


def test_an_ensemble_is_one_classifier_whose_members_hide_pixels_their_own_way(generator):
    own, grey = reference.CurvedMasking((6, 6), 3, generator), nn.Sequential(nn.Flatten(), nn.Linear(72, 3)).eval()
    images = torch.rand(6, 2, 6, 6, generator=generator)

    class Mean:
        """The ensemble by its definition."""

        fill = (0.0, 0.0)

        def masked(self, images, keep):
            filled = torch.where(keep, images, torch.tensor(own.fill)[:, None, None])
            members = own.masked(filled, keep), grey(torch.where(keep, images, 0.5))
            return torch.stack([logits.softmax(dim=1) for logits in members]).mean(dim=0).log()

    defense = pp.PatchCleanser(pp.Ensemble([own, grey]), MASKS, THREAT)
    found = defense.assess(images)
    for row, image in enumerate(images):
        logits = reference.two_mask_logits(Mean(), image, MASKS)
        table = [[reference.argmax(cell) for cell in line] for line in logits]
        assert found.predictions[row] == reference.predict([table[m][m] for m in range(4)], table.__getitem__)
        tau = defense.evaluator.measured.tau_fp32
        assert found.certificates.certified[row] == reference.certify(logits, int(found.predictions[row]), tau=tau)[0]


# --- τ ---------------------------------------------------------------------------------------------------------------


def test_tau_is_measured_before_anything_is_certified():
    """The copy under the first mask has the margin `lead`, and logits change by 1e-3 from batch to batch."""
    batches = []

    def classifier(images, lead=1.0):
        batches.append(len(images))
        first = (images[:, 0, 0, 0] == 0.5) & (images[:, 0, -1, -1] != 0.5)
        wobble = 1e-3 * (len(batches) % 2)
        return torch.stack([torch.where(first, lead, 10.0) + wobble, torch.zeros(len(images))], dim=1)

    images, labels = torch.rand(3, 1, 6, 6, generator=torch.Generator().manual_seed(0)) * 0.4, torch.zeros(3).long()
    for lead, certified in ((1.0, True), (4e-3, False)):  # τ is 8 times the 1e-3 that is seen
        for method in ("certify", "assess"):
            defense = pp.PatchCleanser(lambda x, lead=lead: classifier(x, lead), MASKS, THREAT)
            found = getattr(defense, method)(images, labels)
            found = getattr(found, "certificates", found)
            assert found.certified.tolist() == [certified] * 3
            assert defense.evaluator.measured.tau_fp32 == pytest.approx(8e-3, rel=1e-2)
    sure = defense.with_engine(measured(tau_fp32=1e-3))
    assert sure.certify(images, labels).certified.all(), "what has been measured before is not measured again"


@pytest.mark.parametrize("exhaustive", [False, True])
def test_a_pair_of_masks_that_leads_by_less_than_tau_certifies_nothing(exhaustive):
    """Every single mask leaves a clear lead: it is the share of the pixels that are visible."""

    def classifier(images):
        visible = (images == 1).float().mean(dim=(1, 2, 3))
        return torch.stack([visible, torch.zeros(len(images))], dim=1)

    smallest = min(int((a & b).sum()) for a in MASKS.keep() for b in MASKS.keep()) / 36
    assert smallest + 0.1 < int(MASKS.keep().sum(dim=(1, 2, 3)).min()) / 36
    for tau, certified in ((smallest - 0.01, True), (smallest + 0.01, False)):
        engine = measured(tau_fp32=tau)
        defense = pp.PatchCleanser(classifier, MASKS, THREAT, engine=engine, exhaustive=exhaustive)
        assert defense.certify(torch.ones(1, 1, 6, 6), torch.tensor([0])).certified.tolist() == [certified]


def test_tau_is_measured_again_once_the_weights_have_changed(generator):
    network = nn.Sequential(nn.Flatten(), nn.Linear(36, 3)).eval()
    defense, taus = pp.PatchCleanser(network, MASKS, THREAT), []
    for changed in (False, False, True):
        with torch.no_grad():
            network[1].weight.mul_(100) if changed else None
        defense.certify(torch.rand(3, 1, 6, 6, generator=generator), torch.zeros(3).long())
        taus.append(defense.evaluator.measured.tau_fp32)
    assert taus[0] == taus[1] < 10 * taus[0] < taus[2]


def test_wrong_images_and_labels_are_refused_and_empty_batches_accepted():
    defense = pp.PatchCleanser(lambda x: x.flatten(1)[:, :3], MASKS, THREAT)
    none, labels = torch.zeros(0, 1, 6, 6), torch.zeros(0, dtype=torch.int64)
    assert defense.predict(none).tolist() == defense.certify(none, labels).certified.tolist() == []
    assert defense.assess(none).predictions.tolist() == []
    with pytest.raises(InputError, match=r"height and width \(6, 6\), not \(1, 1, 8, 8\)"):
        defense.predict(torch.zeros(1, 1, 8, 8))
    with pytest.raises(InputError, match="labels run from -1 to 3, but the classifier has the outputs 0 to 2"):
        defense.certify(torch.rand(2, 1, 6, 6), torch.tensor([-1, 3]))
