"""Classifiers that cannot be certified are refused, each for its own reason; τ is measured for the others."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import patchproof as pp
from patchproof.geometry import Fields
from patchproof.masking import _checks
from patchproof.types import CheckError

THREAT = pp.PatchThreat.square(image_size=(8, 8), pixels=2)
MASKS = pp.covering_masks(THREAT, per_axis=2)


def check(classifier, *, num_classes=3, batch_size=4, precision="fp32", count=6, **options):
    images = torch.rand(count, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    engine = pp.Engine(batch_size=batch_size, precision=precision)
    return pp.check_classifier(classifier, images, MASKS, num_classes=num_classes, engine=engine, **options)


def linear(weight: float = 1.0, bias: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 3)).eval()
    model[1].weight.data *= weight
    model[1].bias.data[0] += bias
    return model


def first_three(images):
    return images.flatten(1)[:, :3]


def test_tau_is_eight_times_the_largest_change_seen_or_what_rounding_may_do():
    """The margin of one image of 300 depends on its batch, which only a copy of that image shows."""
    batches = []

    def wobbly(images, by):
        batches.append(len(images))
        odd = images[:, 0].flatten(1).amax(dim=1) > 0.9999
        return first_three(images) + 20 * torch.eye(3)[0] + (odd * by * (len(batches) % 2))[:, None] * torch.eye(3)[0]

    images = torch.rand(300, 1, 8, 8, generator=torch.Generator().manual_seed(1)) * 0.9
    images[250, 0, :, :] = 1.0
    for copies, by, expected in ((300, 1e-2, 8e-2), (30, 1e-2, None), (300, 0.0, None)):
        engine = pp.Engine(batch_size=16)
        found, drift = pp.check_classifier(lambda x, by=by: wobbly(x, by), images, MASKS, engine=engine, copies=copies)
        assert drift.copies == copies
        assert (found.tau, found.batch_size) == (0.0, 16)
        if expected is None:
            expected = 8 * 8 * torch.finfo(torch.float32).eps * drift.scale
            assert drift.scale > 20
        assert found.tau_fp32 == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("differs", [
    lambda rows: len(rows) == 40,  # a whole chunk
    lambda rows: len(rows) == 1,
    lambda rows: rows == 39,  # the last position of a chunk
])  # fmt: skip
def test_tau_comes_from_other_batches_and_positions_too(differs):
    """Each answer is the same every time it is asked for."""

    def classifier(images):
        off = torch.as_tensor(differs(torch.arange(len(images)))).view(-1, 1)
        return first_three(images) + (20 + 1e-3 * off) * torch.eye(3)[0]

    engine, drift = check(classifier, batch_size=40)
    assert drift.repeated == 0
    assert engine.tau_fp32 == pytest.approx(8e-3, rel=1e-2)


def test_tau_is_measured_on_single_views_not_on_what_two_of_them_share():
    shown = set()

    class Watched:
        fill = (0.5,)

        def __call__(self, images):
            return first_three(images)

        def masked(self, images, keep):
            shown.update(keep[:, 0, 0].sum(dim=1).tolist())
            return first_three(images)

    images = torch.rand(6, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    pp.check_classifier(Watched(), images, Fields.bands((8, 8), "column", 2), copies=32)
    assert shown == {2}


def test_a_fast_precision_has_a_larger_tau_from_changes_that_only_pairs_of_masks_may_show():
    def hidden_matters(images):
        """In a fast precision the margin is off by the hidden share."""
        off = (images == 0.5).float().mean(dim=(1, 2, 3)) * (0.5 if torch.is_autocast_enabled("cpu") else 0.0)
        return torch.stack([2.0 - off, images.mean(dim=(1, 2, 3)) * 0.1, torch.zeros(len(images))], dim=1)

    for classifier, smallest in ((linear(), 0.0), (hidden_matters, 0.5)):
        engine, drift = check(classifier, precision="bf16")
        most = max((~MASKS.keep()).float().mean(dim=(1, 2, 3)).tolist())
        assert drift.changes["bf16"] > 1.2 * smallest * most, "more than any one mask hides"
        assert drift.changes["bf16"] > 0
        assert engine.tau == drift.tau_fp32 + 6.5 * drift.changes["bf16"]


def large_batches_differ(images):
    return first_three(images) + (len(images) > 16) * torch.tensor([10.0, 0, 0])


def late_positions_differ(images):
    return first_three(images) + (torch.arange(len(images)) >= 16)[:, None] * 0.5


BATCH = "logits depend on the rest of the batch or the position in it: one changed"


@pytest.mark.parametrize(("classifier", "options", "message"), [
    (linear(bias=torch.nan), {}, "of 1536 logits are NaN or infinite; check the weights"),
    (lambda x: first_three(x) + torch.rand(len(x), 3), {}, "differently when asked twice"),
    (lambda x: first_three(x) - first_three(x).mean(dim=0), {}, BATCH),
    (lambda x: first_three(x) + torch.arange(len(x))[:, None] * 0.5, {}, BATCH),
    (lambda x: first_three(x) + (len(x) == 1) * torch.tensor([10.0, 0, 0]), {}, BATCH),
    (large_batches_differ, {"batch_size": 40}, BATCH),
    (late_positions_differ, {"batch_size": 40}, BATCH),
    (lambda x: torch.zeros(len(x), 3), {}, "answers zero for every class"),
    (linear(weight=1e6), {"precision": "fp16"}, "in fp16; use a wider precision"),
    (linear(), {"num_classes": 10}, "has 3 classes, 10 were expected"),
    (lambda x: x.flatten(1)[:, :1], {"num_classes": None}, "has one output z: give two logits"),
    (nn.Linear(100, 3).eval(), {}, r"fails on images of \(1, 8, 8\) .* is it built for that shape"),
])  # fmt: skip
def test_a_classifier_that_cannot_be_certified_is_refused(classifier, options, message):
    with pytest.raises(CheckError, match=message):
        check(classifier, **options)


# --- which arithmetic is the fastest ---------------------------------------------------------------------------------


def surveyed(rates, again):
    changes = {name: 0.01 for name in again if name != "fp32"}
    return pp.masking.Drift(0.0, 0.0, 0.0, 1.0, 512, changes=changes, again=again, labels_per_second=rates)


def test_auto_takes_the_fastest_sequence_of_precisions_and_says_why():
    rates = {"fp16 fp32": 90.0, "fp16 tf32 fp32": 150.0, "bf16 fp32": 40.0, "tf32 fp32": 120.0, "fp32": 60.0}
    drift = surveyed(rates, {"fp16": 0.25, "bf16": 0.9, "tf32": 0.1, "fp32": 0.0})
    assert drift.fastest("auto") == drift.fastest("fp16") == "fp16 tf32 fp32"
    assert drift.remark("auto").startswith(
        "precision fp16; labels per second: fp16 150 (25% decided again), bf16 40 (90%"
    )
    assert drift.remark("bf16") == "bf16 decides 90% of the labels again; fp16 would be faster"
    assert drift.remark("tf32") == drift.remark("fp32") == ""
    assert surveyed({}, {"bf16": 0.3}).remark("bf16") == "bf16 decides 30% of the labels again; auto takes the fastest"
    assert (surveyed({}, {}).fastest("auto"), surveyed({}, {}).fastest("bf16")) == ("fp32", "bf16 fp32")


def test_a_sequence_of_precisions_costs_what_each_takes_for_the_copies_that_reach_it():
    open_at = {"fp16": [True, True, False, False], "tf32": [True, False, True, False], "fp32": [False] * 4}
    masks = {name: torch.tensor(values) for name, values in open_at.items()}
    rates = _checks.labels_per_second(masks, {"fp16": 1.0, "tf32": 2.0, "fp32": 8.0})
    costs = {"fp16 fp32": 1 + 8 / 2, "fp16 tf32 fp32": 1 + 2 / 2 + 8 / 4, "tf32 fp32": 2 + 8 / 2, "fp32": 8.0}
    assert rates == {way: pytest.approx(1 / cost) for way, cost in costs.items()}


def test_without_a_gpu_auto_is_float32():
    images = torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    engine = pp.Engine(precision="auto", compile="auto")
    measured, drift = pp.check_classifier(linear(), images, MASKS, engine=engine, work=10**9)
    assert (measured.precision, measured.compile, measured.tau, measured.steps) == ("fp32", False, 0.0, [("fp32", 0.0)])
    assert drift.remark("auto") == ""
