"""Detection: a certified image with any patch gets the right label or an alarm, never a wrong label."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import patchproof as pp
import reference
from patchproof.defenses import assess
from patchproof.runs import estimate_cost
from patchproof.runs._measure import generated_images
from patchproof.types import InputError
from reference import measured
from test_defenses_patchcleanser import CASES, TWO_PATCHES, random_case


@pytest.mark.parametrize(
    ("image_size", "patch", "per_axis", "patches"),
    [(*CASES[0], 1), (*TWO_PATCHES, 2), pytest.param(*CASES[1], 1, marks=pytest.mark.slow)],
)
def test_a_certified_image_never_gets_a_wrong_label_unless_a_mask_is_dropped(
    image_size, patch, per_axis, patches, monkeypatch
):
    threat = pp.PatchThreat(image_size, (patch,), patches)
    masks, label = pp.covering_masks(threat, per_axis=per_axis), 1
    clean, patched = torch.full((1, 1, *image_size), reference.CLEAN), reference.patched_everywhere(threat)
    answers = []
    for scheme in reference.schemes(masks, label):
        defense = pp.Alarm(reference.Adversary(label, scheme), masks, threat, engine=measured())
        assert defense.certify(clean, torch.tensor([label])).certified.all()
        answers.append(defense.predict(patched))
    assert set(torch.cat(answers).tolist()) == {label, -1}

    holed = pp.MaskSet(image_size, masks.rects[1:] if patches == 1 else masks.rects[:-1])
    with pytest.raises(InputError, match="masks do not cover the threat"):
        pp.Alarm(reference.Adversary(label, lambda _: 0), holed, threat)
    monkeypatch.setattr(pp.MaskSet, "uncovered", lambda *_: ())
    fooled = [pp.Alarm(reference.Adversary(label, scheme), holed, threat).predict(patched)
              for scheme in reference.schemes(holed, label)]  # fmt: skip
    assert (label + 1) % 3 in torch.cat(fooled).tolist()


@given(st.integers(0, 2**32), st.integers(1, 50), st.sampled_from([1e-9, 0.25, 2.0]))
def test_predict_and_certify_equal_the_reference_exactly_with_early_exit_or_without(seed, chunk, tau):
    classifier, threat, masks, images, labels = random_case(seed)
    defense = pp.Alarm(classifier, masks, threat, engine=measured(batch_size=chunk, tau_fp32=tau))
    early, all_masks, alone = defense.certify(images, labels), defense.assess(images, labels), defense.assess(images)
    for row, (image, label) in enumerate(zip(images, labels.tolist(), strict=True)):
        logits = [reference.logits_under(classifier, image, part) for part in masks.parts]
        answer = reference.predict_or_alarm([reference.argmax(cell) for cell in logits])
        certified, margin = reference.certify([logits], label, tau=tau)
        assert defense.predict(images[row : row + 1]) == all_masks.predictions[row] == alone.predictions[row] == answer
        for found in (early, all_masks.certificates):
            assert bool(found.certified[row]) == certified
            (mask,) = found.evidence["witness.masks"][row].tolist()
            assert float(found.margin[row]) == reference.margin_of(logits[mask], label)
            assert int(found.evidence["witness.label"][row]) == reference.argmax(logits[mask])
        assert all_masks.certificates.forwards[row] == len(masks) >= early.forwards[row]
        if certified:
            assert float(early.margin[row]) == margin
        own = answer >= 0 and reference.certify([logits], answer, tau=tau)[0]
        assert bool(alone.certificates.certified[row]) == own


def test_an_alarm_is_never_certified_even_if_the_defence_certifies_everything():
    defense = SimpleNamespace(
        name="certain",
        guarantee="detection",
        threat=pp.PatchThreat((4, 4), ((1, 1),)),
        describe=dict,
        predict=lambda images: torch.tensor([2, -1, 0]),
        certify=lambda images, labels: pp.Certificates(torch.ones(3, dtype=torch.bool), labels.float(), labels),
    )
    images = torch.zeros(3, 1, 4, 4)
    found = assess(defense, images)
    assert found.predictions.tolist() == [2, -1, 0]
    assert found.certificates.certified.tolist() == [True, False, True]
    assert assess(defense, images, torch.tensor([2, 1, 0])).certificates.margin.tolist() == [2, 1, 0]


def test_attacks_are_timed_even_if_the_timed_image_raises_an_alarm():
    def classifier(images):
        """The label of the brighter half."""
        halves = images[..., :4, :].mean(dim=(1, 2, 3)), images[..., 4:, :].mean(dim=(1, 2, 3))
        return 9 * torch.stack(halves, dim=1)

    classifier.fill = (0.0, 0.0, 0.0)
    defense = pp.defense("alarm", classifier, pp.PatchThreat((8, 8), ((2, 2),)), per_axis=2)
    assert defense.predict(generated_images(1, defense)).tolist() == [-1]
    cost = estimate_cost(defense, 4, pp.AttackPlan(steps=10))
    assert cost is not None
    assert cost.attack_seconds > 0


def test_a_slow_moment_while_timing_does_not_raise_the_estimate(monkeypatch):
    calls, now = {True: 0, False: 0}, [0.0]  # calls with gradients and without

    def passed(seconds):
        now[0] += seconds
        return now[0]

    def classifier(images):
        calls[images.requires_grad] += 1
        if calls[images.requires_grad] in ((2,) if images.requires_grad else (1, 2, 3, 4)):
            passed(0.1)
        return images.flatten(1)[:, :2]

    monkeypatch.setattr("patchproof.runs._cost.time", SimpleNamespace(perf_counter=lambda: passed(0.001)))
    defense = pp.defense("alarm", classifier, pp.PatchThreat((8, 8), ((2, 2),)), per_axis=2)
    cost = estimate_cost(defense, 1, pp.AttackPlan(steps=1, target="defended"))
    assert cost is not None
    assert cost.most_seconds < 0.001, "although the first batches took 0.1 s"
    assert 0 < cost.attack_seconds < 0.1, "although the first second step did"
