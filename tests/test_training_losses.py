"""Losses by name and by users, views as a strategy, and training with them through one loop."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import patchproof as pp
from patchproof.data import ArraySource, iterate_batches
from patchproof.geometry import all_places
from patchproof.models import ImageClassifier, load_classifier, margin_bounds
from patchproof.models._classifier import seeded
from patchproof.models._networks import AblatedResNet, BagNet
from patchproof.training import STRATEGIES, masking_strategy
from patchproof.training.augment import flip_and_shift
from patchproof.training.losses import BagCertLoss, IntervalLoss, step_scores
from patchproof.types import CheckError, InputError, Preprocessing

THREAT = pp.PatchThreat((16, 16), ((3, 3), (2, 5)))


def source(count: int = 24, side: int = 16) -> ArraySource:
    """Red and blue images, which can be classified from any part of them."""
    pixels = np.random.default_rng(1).integers(0, 80, (count, side, side, 3)).astype(np.uint8)
    pixels[::2, ..., 0] += 150
    pixels[1::2, ..., 2] += 150
    return ArraySource("colours", "train", ("red", "blue"), tuple(i % 2 for i in range(count)), pixels)


@pytest.mark.parametrize(("name", "visible"), [("column4", (16, 4)), ("row3", (3, 16)), ("block5", (5, 5))])
def test_views_show_one_band_that_wraps_around(name, visible, generator):
    images, labels = torch.rand(400, 3, 16, 16), torch.zeros(400, dtype=torch.int64)
    strategy = masking_strategy(name, image_size=(16, 16), generator=generator, views=2)
    both = strategy(lambda images: images, images, labels)[:, :, 0]
    assert len(both) == 2
    assert (both[0] != both[1]).flatten(1).any(dim=1).float().mean() > 0.8, "each its own view"
    keep = both[0]
    assert (keep.sum(dim=(1, 2)) == visible[0] * visible[1]).all()
    views = torch.zeros(16, 16, dtype=torch.bool)
    views[: visible[0], : visible[1]] = True
    expected = {views.roll((r, q), (0, 1)).numpy().tobytes() for r in range(16) for q in range(16)}
    assert {one.numpy().tobytes() for one in keep} <= expected
    assert len({one.numpy().tobytes() for one in keep}) > 0.7 * len(expected)
    assert (keep.float().mean(dim=0) - visible[0] * visible[1] / 256).abs().amax() < 0.12, "every place as often"


def test_views_are_named_by_their_width_and_refused_if_wider_than_the_image(generator):
    assert {"column4", "row4", "block12"} <= set(STRATEGIES)
    with pytest.raises(InputError, match="band must be from 1 to the 16 pixels of the image, not 17"):
        masking_strategy("column17", image_size=(16, 16), generator=generator)
    with pytest.raises(InputError, match="unknown masking strategy `colum4`; did you mean `column4`"):
        pp.Plan(strategy="colum4")


def test_shifts_take_pixels_of_the_image_by_the_generator_alone():
    columns = torch.arange(16.0).expand(200, 1, 16, 16) / 16
    found = [flip_and_shift(columns, torch.Generator().manual_seed(s))[0] for s in (1, 1, 2)]
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    rows = {tuple((image[0, 0] * 16).int().tolist()) for image in found[0]}
    shifted = [[abs(i + s) if i + s < 16 else 30 - (i + s) for i in range(16)] for s in range(-2, 3)]
    assert rows == {tuple(row) for s in shifted for row in (s, [15 - i for i in s])}
    upright, _ = flip_and_shift(columns.mT, torch.Generator().manual_seed(1))
    assert {tuple((image[0, :, 0] * 16).int().tolist()) for image in upright} == set(map(tuple, shifted))


def slow_margins(scores: Tensor, label: int, field: tuple[int, int, int]) -> list[float]:
    """BagCert's margins in plain Python: every patch, and each class but the label."""
    (classes, rows, columns), (size, stride, offset) = scores.shape, field
    worst = {c: float("inf") for c in range(classes) if c != label}
    values = scores.tolist()
    cells = [(r, q) for r in range(rows) for q in range(columns)]
    for height, width in THREAT.patch_sizes:
        for top in range(10 - height + 1):
            for left in range(10 - width + 1):
                seen = {
                    (r, q)
                    for r, q in cells
                    if offset + r * stride < top + height
                    and offset + r * stride + size > top
                    and offset + q * stride < left + width
                    and offset + q * stride + size > left
                }
                for c in worst:
                    lead = sum(values[label][r][q] - values[c][r][q] for r, q in cells if (r, q) not in seen)
                    worst[c] = min(worst[c], lead - len(seen))
    return [margin / len(cells) for margin in worst.values()]


@pytest.mark.parametrize("blocks", [[(8, 3, 1), (8, 1, 1)], [(8, 3, 2), (8, 1, 1)]])
def test_the_bagcert_loss_is_a_smooth_hinge_on_the_margins_of_the_certificate_and_later_a_ramp(blocks, generator):
    with seeded(3):
        network = BagNet(3, blocks=blocks).eval()
    classifier = load_classifier("bagnet5", "random", num_classes=3, input_size=(10, 10))
    classifier.module = network
    images, labels = torch.rand(2, 3, 10, 10, generator=generator), torch.tensor([2, 0])
    network.head.bias.data = -classifier.local_logits(images).mean(dim=(0, 2, 3)).detach()
    logits = classifier.local_logits(images)
    scores = step_scores(logits)
    assert set(scores.flatten().tolist()) == {0.0, 1.0}
    (slope,) = torch.autograd.grad(scores.sum(), logits, retain_graph=True)
    spread = logits.abs().mean()
    torch.testing.assert_close(slope, (soft := (logits / spread).sigmoid()) * (1 - soft) / spread)
    nothing = torch.zeros(4, requires_grad=True)
    (slope,) = torch.autograd.grad(step_scores(nothing).sum(), nothing)
    assert (slope.isfinite() & (slope < 1e8)).all()
    margins = [slow_margins(scores[i].detach(), int(labels[i]), network.receptive_field) for i in range(2)]
    threat = pp.PatchThreat((10, 10), THREAT.patch_sizes)
    for sharpness in (8.0, 1e5):
        loss = BagCertLoss.of(classifier, threat, target=0.3, sharpness=sharpness)(classifier, images, labels, 0.3)
        smooth = [torch.tensor([0.0, *(0.3 - m for m in every)]).mul(sharpness).logsumexp(0) for every in margins]
        assert loss.item() == pytest.approx(sum(map(float, smooth)) / 2 / sharpness, abs=1e-5)
    assert loss.item() == pytest.approx(sum(max(0, 0.3 - min(every)) for every in margins) / 2, abs=1e-4), "the hinge"
    smallest = torch.tensor([min(every) for every in margins])
    ramp = (0.4 / (1 + (smallest / 0.1 - 1).exp())).mean().item()
    for progress, share in ((0.4, 0.0), (0.55, 0.4), (0.7, 0.8), (1.0, 0.8)):
        late = BagCertLoss.of(classifier, threat, target=0.3, sharpness=1e5)(classifier, images, labels, progress)
        assert late.item() == pytest.approx((1 - share) * loss.item() + share * ramp, abs=1e-4)
    late.backward()
    assert network.stem[0].weight.grad.abs().sum() > 0


def test_the_interval_loss_grows_from_plain_training_to_the_bounds_of_patches():
    classifier = load_classifier("cnn_ibp", "random", num_classes=3, input_size=(16, 16), seed=1)
    images, labels = torch.rand(5, 3, 16, 16), torch.tensor([0, 1, 2, 0, 1])
    loss = IntervalLoss(THREAT, positions=3)
    plain = torch.nn.functional.cross_entropy(classifier(images), labels)
    assert loss(classifier, images, labels, 0.1) == plain
    with seeded(4):
        places = loss.places(15)
        drawn = IntervalLoss(THREAT).places(10000)
    assert set(map(tuple, drawn.tolist())) == set(map(tuple, all_places(THREAT).tolist()))
    weights, losses = list(classifier.parameters()), [plain]
    for progress, grown in ((0.35, 0.5), (0.7, 1.0)):
        with seeded(4):
            found = loss(classifier, images, labels, progress)
        bounds = [
            margin_bounds(classifier, images, labels, torch.arange(5), each, share=grown, rounding=False)
            for each in places.split(len(images))
        ]
        worst = torch.nn.functional.cross_entropy(-torch.stack(bounds).amin(dim=0), labels)
        expected = (1 - grown) * torch.nn.functional.cross_entropy(classifier(images), labels) + grown * worst
        torch.testing.assert_close(found, expected)
        slopes = zip(*(torch.autograd.grad(value, weights) for value in (found, expected)), strict=True)
        for slope, wanted in slopes:
            torch.testing.assert_close(slope, wanted, rtol=1e-4, atol=1e-4)
        losses.append(found)
    assert losses == sorted(losses)


def hinge(classifier, images, labels, progress):
    """A user's loss."""
    seen.append(progress)
    logits, every = classifier(images), torch.arange(len(images))
    return (1 - logits[every, labels] + logits[every, 1 - labels]).relu().mean()


seen: list[float] = []


def views(width, classifier, images, labels, *, indices=None, epoch=0):
    """A user's strategy."""


def certified(classifier: ImageClassifier) -> bool:
    """By interval bounds, for a patch in the middle of every image."""
    images = next(iterate_batches(source(), Preprocessing((16, 16)), range(24), batch_size=24)).images / 255
    every, labels = torch.arange(24), torch.arange(24) % 2
    bounds = margin_bounds(classifier, images, labels, every, torch.tensor((6, 6, 3, 3)).expand(24, 4))
    return bool((bounds.gather(1, 1 - labels[:, None]) > 0).all())


TRAINED = [
    ("bagnet5", {"loss": "bagcert", "strategy": "none"}),
    ("cnn_ibp", {"loss": "ibp", "strategy": "none", "optimizer": "adamw", "learning_rate": 0.01}),
    ("resnet18_ablated", {"strategy": "column4", "augment": "shift"}),
    ("small", {"loss": hinge, "strategy": "none"}),
]


@pytest.mark.parametrize(("model", "how"), TRAINED, ids=[model for model, _ in TRAINED])
def test_every_loss_trains_through_the_same_loop(model, how):
    classifier = load_classifier(model, "random", class_names=("red", "blue"), input_size=(16, 16))
    with seeded(1):
        if model == "bagnet5":
            classifier.module = BagNet(2, blocks=[(16, 3, 1), (16, 1, 1)])
        if model == "cnn_ibp":
            layers = nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 64, 2)
            classifier.module = nn.Sequential(*layers)
        if model == "resnet18_ablated":
            classifier.module = AblatedResNet(2, widths=(16, 32))
    plan = pp.Plan(epochs=8, batch_size=8, learning_rate=0.05, mask_patch="3px", schedule="constant")
    reports: list[float] = []
    if model == "cnn_ibp":  # as the certificate that it is the bound of
        assert not certified(classifier)
    pp.train(classifier, source(), dataclasses.replace(plan, **how), on_step=lambda step: reports.append(step.loss))
    assert len(reports) == 24
    assert np.isfinite(reports).all()
    batch = next(iterate_batches(source(), Preprocessing((16, 16)), range(24), batch_size=24))
    right = classifier(batch.images / 255).argmax(dim=1) == batch.labels
    assert int(right.sum()) == 24
    if model == "cnn_ibp":
        assert certified(classifier)
    if how.get("loss") is hinge:
        assert seen == [step / 24 for step in range(24)]


def test_impossible_losses_are_refused_and_others_described():
    with pytest.raises(InputError, match="strategy must be `none` with the loss 'bagcert', which sees whole images"):
        pp.Plan(loss="bagcert")
    with pytest.raises(InputError, match="loss must be one of cross-entropy, bagcert, ibp, or a callable, not bagcer"):
        pp.Plan(loss="bagcer")
    classifier = load_classifier("small", "random", class_names=("red", "blue"), input_size=(16, 16))
    for loss, message in (
        ("bagcert", "needs a network with `local_logits` and `receptive_field`, e.g. bagnet5, not small"),
        ("ibp", "SmallRes"),
    ):
        with pytest.raises(InputError, match=message):
            pp.train(classifier, source(), pp.Plan(loss=loss, strategy="none"))
    with pytest.raises(InputError, match=r"called as loss\(classifier, images, labels, progress\): too many"):
        pp.Plan(loss=lambda classifier, images, labels: 0, strategy="none")
    for given, kind in ((0.5, "float"), (torch.ones(12), r"torch.float32 of \(12,\)"), (torch.ones(()), "of ()")):
        plan = pp.Plan(loss=lambda *_, given=given: given, strategy="none", epochs=1)
        with pytest.raises(InputError, match=f"loss must return the mean over the images, .*, not .*{kind}"):
            pp.train(classifier, source(), plan)
    for loss, described in (
        (hinge, "hinge"),
        (partial(hinge, margin=1), 'hinge {"margin": 1}'),
        (partial(partial(hinge, weights=torch.ones(2)), base=hinge), 'hinge {"base": "hinge", "weights": [1.0, 1.0]}'),
    ):
        assert pp.Plan(loss=loss, strategy="none").describe()["loss"] == described
    smaller = pp.PatchThreat((16, 16), ((3, 3),))
    network = load_classifier("bagnet5", "random", num_classes=3, input_size=(16, 16))
    different = [IntervalLoss(THREAT), IntervalLoss(smaller), IntervalLoss(THREAT, positions=4)]
    different += [BagCertLoss.of(network, t, ramp=ramp) for t in (THREAT, smaller) for ramp in (0.0, 0.5)]
    different += [partial(hinge, threat=THREAT), partial(hinge, threat=smaller), partial(hinge, teacher=network)]
    named = [pp.Plan(loss=loss, strategy="none").describe()["loss"] for loss in different]
    assert len(set(named)) == len(different)
    numbers = partial(hinge, margin=np.int64(1))
    assert pp.Plan(loss=numbers, strategy="none").describe()["loss"] == 'hinge {"margin": 1}'
    with pytest.raises(InputError, match="is of type set, which a resumed training cannot compare"):
        pp.Plan(loss=partial(hinge, classes={1, 2}), strategy="none").describe()
    with pytest.raises(InputError, match="not the class BagCertLoss; give an instance"):
        pp.Plan(loss=BagCertLoss, strategy="none")
    assert pp.Plan(strategy=partial(views, 8)).describe()["strategy"] == 'views {"0": 8}'
    pp.Plan(loss=min, strategy="none")  # has no signature to look at
    plan = pp.Plan(validate_with="bagcer", strategy="none")
    with pytest.raises(InputError, match="unknown defence `bagcer`"):
        pp.train(classifier, source(), plan, validation=source())


def test_settings_of_losses_that_would_give_nan_are_refused():
    classifier = load_classifier("bagnet5", "random", num_classes=3, input_size=(16, 16))
    for settings, message in (
        ({"begin": 0.0, "full": 0.0}, "begin must be less than full, where the ramp is complete, not 0.0 of 0.0"),
        ({"width": 0.0}, "sharpness and width must be above 0 and ramp from 0 to 1, not 10.0, 0.0 and 0.8"),
        ({"sharpness": 0.0}, "sharpness and width must be above 0"),
        ({"ramp": 1.5}, "ramp from 0 to 1, not 10.0, 0.1 and 1.5"),
    ):
        with pytest.raises(InputError, match=message):
            BagCertLoss.of(classifier, THREAT, **settings)
    with pytest.raises(InputError, match=r"plain must be less than warm, .*, not 0\.5 of 0\.5"):
        IntervalLoss(THREAT, plain=0.5, warm=0.5)
    with pytest.raises(InputError, match="positions must be at least 1, not 0"):
        IntervalLoss(THREAT, positions=0)


def test_the_bagcert_loss_of_an_own_network_is_that_by_name():
    class Bag(nn.Module):
        receptive_field = (3, 1, 0)

        def __init__(self):
            super().__init__()
            self.cells = nn.Conv2d(3, 2, 3)

        def local_logits(self, images):
            return self.cells(images)

        def forward(self, images):
            return self.local_logits(images).mean(dim=(2, 3))

    weights = []
    for by_name in (True, False):
        with seeded(0):
            network = Bag()
        loss = "bagcert" if by_name else BagCertLoss.of(network, pp.PatchThreat((16, 16), ((3, 3),)))
        pp.train(network, source(), pp.Plan(loss=loss, strategy="none", mask_patch="3px", epochs=1))
        weights.append(network.cells.weight)
    assert torch.equal(*weights)
    with pytest.raises(InputError, match=r"needs a network with `local_logits` and .*, not Flatten"):
        BagCertLoss.of(nn.Flatten(), THREAT)


def test_a_run_with_a_loss_of_progress_cannot_be_extended(tmp_path):
    def sharper(classifier, images, labels, progress):
        return (1 + progress) * nn.functional.cross_entropy(classifier(images), labels)

    plan = pp.Plan(loss=sharper, strategy="none", schedule="constant", epochs=1, batch_size=12, learning_rate=0.01)
    for epochs, resume in ((1, False), (1, True), (2, True)):
        classifier = load_classifier("small", "random", class_names=("red", "blue"), input_size=(16, 16))
        words = "cannot go on to 2 epochs: with a loss that knows its progress the 2 steps done depend on"
        with nullcontext() if epochs == 1 else pytest.raises(CheckError, match=words):
            pp.train(classifier, source(), dataclasses.replace(plan, epochs=epochs), folder=tmp_path, resume=resume)


COMPILED = """
import json, torch
import patchproof as pp
from patchproof.models import load_classifier
images = torch.rand(24, 3, 16, 16, generator=torch.Generator().manual_seed(0))
data = [(image, number % 2) for number, image in enumerate(images)]
for compiled in (False, True):
    classifier = load_classifier("bagnet5", "random", num_classes=2, input_size=(16, 16), seed=0)
    options = dict(mask_patch="3px", epochs=4, batch_size=16, learning_rate=0.001, optimizer="adamw", compile=compiled)
    losses = []
    plan = pp.Plan(strategy="none", loss="bagcert", **options)
    pp.train(classifier, data, plan, on_step=lambda report: losses.append(report.loss))
    print(json.dumps(losses))
print(torch._dynamo.utils.counters["stats"]["unique_graphs"])
"""


@pytest.mark.slow
def test_a_compiled_loss_is_the_loss():
    """Train on whole batches and a short one, in a separate process so that the tests' type checks are not compiled."""
    words = [sys.executable, "-c", COMPILED]
    plain, compiled, graphs = map(json.loads, subprocess.check_output(words, text=True).splitlines())
    assert graphs == 1, "it is not compiled again as training goes on"
    assert compiled == pytest.approx(plain, rel=0.02)  # a step at zero makes much of a last digit
