"""Classifiers no certificate can be about are found out, each with its own words."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import patchproof as pp
from patchproof import checks
from patchproof.checks import check_classifier
from patchproof.types import CheckError

THREAT = pp.PatchThreat.square(image_size=(8, 8), pixels=2)
MASKS = pp.covering_masks(THREAT, per_axis=2)


def check(classifier, *, num_classes=3, engine=None):
    images = torch.rand(6, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    return check_classifier(classifier, images, MASKS, num_classes=num_classes, engine=engine or pp.Engine(chunk=4))


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 3)).eval()


def test_a_sound_classifier_passes_and_gets_a_small_positive_tau():
    engine, drift = check(linear())
    assert 0 < engine.tau_fp32 < 1e-3
    assert engine.tau == 0
    assert drift.scale > 0


def test_a_faster_precision_gets_a_larger_tau_that_exceeds_the_logit_change_seen():
    engine, drift = check(linear(), engine=pp.Engine(chunk=4, precision="bf16"))
    assert drift.precision > 0
    assert engine.tau > 2 * drift.precision
    assert engine.tau > engine.tau_fp32


def test_training_mode_is_refused_with_the_module_named():
    model = linear()
    model[1].train()
    with pytest.raises(CheckError, match=r"training mode \(1 modules, e\.g\. 1\); call classifier\.eval"):
        check(model)


def test_nan_logits_are_refused():
    model = linear()
    model[1].bias.data[0] = torch.nan
    with pytest.raises(CheckError, match="12 of 36 logits are NaN or infinite"):
        check(model)


def test_randomness_is_found_out():
    with pytest.raises(CheckError, match="differently when asked twice"):
        check(lambda x: x.flatten(1)[:, :3] + torch.rand(len(x), 3))


def test_dependence_on_the_rest_of_the_batch_is_found_out():
    with pytest.raises(CheckError, match="depends on the other images of the batch"):
        check(lambda x: x.flatten(1)[:, :3] - x.flatten(1)[:, :3].mean(dim=0))


def test_dependence_on_the_place_in_the_batch_is_found_out():
    with pytest.raises(CheckError, match="the place in it"):
        check(lambda x: x.flatten(1)[:, :3] + torch.arange(len(x))[:, None] * 0.5)


def test_what_happens_only_in_batches_as_large_as_the_runs_is_found_out():
    def large_batches_cheat(x):
        honest = x.flatten(1)[:, :3]
        return honest if len(x) <= 16 else honest + torch.tensor([10.0, 0.0, 0.0])

    with pytest.raises(CheckError, match="depends on the other images of the batch"):
        check(large_batches_cheat, engine=pp.Engine(chunk=40))
    with pytest.raises(CheckError, match="the place in it"):
        check(lambda x: x.flatten(1)[:, :3] + (torch.arange(len(x)) >= 16)[:, None] * 0.5, engine=pp.Engine(chunk=40))


def test_a_classifier_that_says_nothing_is_refused():
    with pytest.raises(CheckError, match="answers zero for every class"):
        check(lambda x: torch.zeros(len(x), 3))


def test_a_precision_that_overflows_is_refused():
    model = linear()
    model[1].weight.data *= 1e6
    with pytest.raises(CheckError, match="in fp16; use a wider one"):
        check(model, engine=pp.Engine(chunk=4, precision="fp16"))


@pytest.mark.parametrize("classes", [2, 10, 1000])
def test_the_wrong_number_of_classes_is_refused(classes):
    with pytest.raises(CheckError, match=f"answers 3 classes, {classes} were expected"):
        check(linear(), num_classes=classes)


def test_output_that_is_no_logits_is_refused():
    with pytest.raises(CheckError, match=r"to \(4, 1, 8, 8\); it must return logits of shape \(4, classes\)"):
        check(lambda x: x)


def test_the_wrong_input_size_is_refused_with_the_way_out():
    model = nn.Sequential(nn.Flatten(), nn.Linear(100, 3)).eval()
    with pytest.raises(CheckError, match=r"does not accept images of \(1, 8, 8\).*--image-size"):
        check(model)


def test_the_tau_of_a_fast_precision_is_measured_on_pairs_of_masks():
    pairs = checks._random_pairs(512, pp.covering_masks(THREAT, per_axis=4), checks.FAST_COPIES)
    assert pairs.image.tolist() == list(range(512))
    assert int((pairs.first != pairs.second).sum()) > 400


def test_a_change_that_only_pairs_of_masks_show_raises_tau():
    def classifier(images):
        """In fast arithmetic the lead is off by what is hidden."""
        hidden = (images == 0.5).float().mean(dim=(1, 2, 3))
        off = hidden * (0.5 if torch.is_autocast_enabled("cpu") else 0.0)
        return torch.stack([2.0 - off, images.mean(dim=(1, 2, 3)) * 0.1, torch.zeros(len(images))], dim=1)

    engine, drift = check(classifier, engine=pp.Engine(chunk=4, precision="bf16"))
    largest = max(float(m) for m in (~MASKS.keep()).float().mean(dim=(1, 2, 3)))
    assert drift.precision > 0.5 * largest * 1.2  # more than any one mask hides
    assert engine.tau > checks.FAST_SAFETY * drift.precision
