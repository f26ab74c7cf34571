"""Interval bounds by brute force: no patch content at any position moves a margin out of its bounds or changes a
certified prediction, unless the window is one pixel too small."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor, nn

import patchproof as pp
import reference
from patchproof.defenses import IntervalBounds, assess
from patchproof.geometry import all_places, inside
from patchproof.models import ImageClassifier, load_classifier
from patchproof.models._classifier import seeded
from patchproof.types import CheckError, InputError

SIZE = (9, 8)
THREAT = pp.PatchThreat(SIZE, ((2, 3), (3, 2)))


def attained() -> nn.Module:
    """One linear layer, for which a patch can reach the bounds."""
    with seeded(3):
        found = nn.Sequential(nn.Flatten(), nn.Linear(144, 3))
        found[1].weight.data += torch.randn(3, 2, 1).expand(3, 2, 72).flatten(1) / 4
    return ImageClassifier(found, mean=(0.3, 0.6), std=(0.4, 0.3), input_size=SIZE, num_classes=3).eval()


def network() -> nn.Module:
    """Logits follow colours wherever they are, so that a patch moves some answers and bounds certify others."""
    with seeded(2):
        layers = nn.Conv2d(2, 6, 3, stride=2, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(120, 3)
        found = nn.Sequential(*layers)
        found[1].running_mean.uniform_(-0.2, 0.2)
        found[1].running_var.uniform_(0.5, 1.5)
        found[4].weight.data += torch.randn(3, 6, 1).expand(3, 6, 20).flatten(1)
    return ImageClassifier(found, mean=(0.3, 0.6), std=(0.4, 0.3), input_size=SIZE, num_classes=3).eval()


def attacked(image: Tensor, place: Tensor, network: nn.Module, label: int, generator: torch.Generator) -> Tensor:
    """Black, white, noise, and the corners of [0, 1] that each class's gradient and a few steps of it point to."""
    where = inside(place[None], SIZE)[0]
    contents = [torch.zeros(4, 2, *SIZE), torch.ones(4, 2, *SIZE), torch.rand(40, 2, *SIZE, generator=generator)]
    contents.append(torch.rand(40, 2, *SIZE, generator=generator).round())
    start = torch.where(where, torch.cat(contents), image)
    found = [start]
    for other in {0, 1, 2} - {label}:
        x = start[::8].clone()
        for _ in range(3):
            x.requires_grad_()
            logits = network(x)
            (gradient,) = torch.autograd.grad((logits[:, other] - logits[:, label]).sum(), x)
            x = torch.where(where, (gradient > 0).float(), image)
            found.append(x)
    return torch.cat(found).detach()


def broken(defense: IntervalBounds, images: Tensor, labels: Tensor, places: Tensor, generator) -> tuple[int, int]:
    """The number of certified images, and the number of patches at these places that break a bound or a prediction.

    Patches are tried on the certified images of smallest margin.
    """
    proof, below = defense.certify(images, labels), 0
    for row in proof.margin.masked_fill(~proof.certified, torch.inf).argsort()[:4].tolist():
        label = int(labels[row])
        for place in places:
            x = attacked(images[row], place, defense.classifier, label, generator)
            logits = defense._logits(x)
            rest = logits.scatter(1, labels[row].expand(len(x), 1), -torch.inf).amax(dim=1)
            below += int((logits[:, label] - rest < float(proof.margin[row]) - 1e-6).sum())
            below += int((defense.predict(x) != label).sum())
    return int(proof.certified.sum()), below


@pytest.mark.parametrize("make", [attained, network])
def test_no_patch_moves_a_certified_answer_unless_the_window_is_one_pixel_too_small(make, generator):
    classifier = make()
    images = (torch.rand(40, 2, *SIZE, generator=generator) + 2 * torch.rand(40, 2, 1, 1, generator=generator)) / 3
    labels = classifier(images).argmax(dim=1)
    defense = IntervalBounds(classifier, THREAT, engine=pp.Engine(batch_size=50))
    certified, below = broken(defense, images, labels, all_places(THREAT)[::8], generator)
    assert 4 < certified < 36
    assert below == 0
    if make is network:
        return
    smaller = IntervalBounds(classifier, pp.PatchThreat(SIZE, ((1, 3), (3, 1))))
    more, fallen = broken(smaller, images, labels, all_places(THREAT)[::8], generator)
    assert more > certified
    assert fallen > 0


def test_every_position_of_every_size_is_bounded_and_windows_change_no_verdict(generator):
    """Compare with plain loops over every position, for several batch sizes."""
    classifier, images = network(), torch.rand(12, 2, *SIZE, generator=generator)
    images = (images + 2 * torch.rand(12, 2, 1, 1, generator=generator)) / 3
    labels, exact = classifier(images).argmax(dim=1), network().double()

    def bounds(row: int, places: list[tuple[int, int, int, int]]) -> list[float]:
        lower, upper = images[row].double().repeat(2, len(places), 1, 1, 1)
        for number, (top, left, height, width) in enumerate(places):
            lower[number, :, top : top + height, left : left + width] = 0
            upper[number, :, top : top + height, left : left + width] = 1
        found = reference.interval_margins(exact, lower, upper, int(labels[row])).detach()
        return [min(b for c, b in enumerate(each) if c != int(labels[row])) for each in found.tolist()]

    places = [
        (top, left, height, width)
        for height, width in THREAT.patch_sizes
        for top in range(SIZE[0] - height + 1)
        for left in range(SIZE[1] - width + 1)
    ]
    smallest = [min(bounds(row, places)) for row in range(len(images))]
    taken: dict[int, int] = {}
    for batch in (1, 7, 500):
        defense = IntervalBounds(classifier, THREAT, engine=pp.Engine(batch_size=batch))
        found = assess(defense, images, labels)
        proof = found.certificates
        assert proof.certified.tolist() == [value > 0 for value in smallest]
        for row, value in enumerate(smallest):
            place = tuple(proof.evidence["worst.place"][row].tolist())
            assert float(proof.margin[row]) == pytest.approx(*bounds(row, [place]))
            if proof.certified[row]:
                assert float(proof.margin[row]) <= value + 1e-6
            else:
                assert place in places
            assert int(proof.evidence["worst.label"][row]) != int(labels[row])
            taken.setdefault(row, int(proof.forwards[row]))
            assert defense.fewest_passes <= int(proof.forwards[row]) == taken[row] <= defense.most_passes
        assert torch.equal(found.predictions, labels)
    certified = [taken[row] for row, value in enumerate(smallest) if value > 0]
    assert min(certified) < len(places) < max(certified)  # where windows are enough, and where they are not
    wrong = IntervalBounds(classifier, THREAT).certify(images, (labels + 1) % 3)
    assert not wrong.certified.any()
    assert (wrong.margin < 0).all()


@pytest.mark.parametrize("patch", [(9, 8), (9, 7), (8, 6), (1, 8)])
def test_few_positions_and_no_images(patch, generator):
    """Threats with fewer positions than a block holds, some in a single row."""
    classifier, images = network(), torch.rand(5, 2, *SIZE, generator=generator)
    defense = IntervalBounds(classifier, pp.PatchThreat(SIZE, (patch,)))
    taken = defense.certify(images, classifier(images).argmax(dim=1)).forwards
    assert defense.fewest_passes <= int(taken.min()) <= int(taken.max()) <= defense.most_passes
    none = defense.certify(images[:0], torch.zeros(0, dtype=torch.int64))
    assert none.certified.shape == none.forwards.shape == defense.predict(images[:0]).shape == (0,)


def test_networks_without_bounds_are_refused():
    with pytest.raises(InputError, match="cannot pass the layer SmallResNet, only Conv2d"):
        pp.defense("ibp", load_classifier("small", "random"), THREAT)
    with pytest.raises(InputError, match="ibp needs a network of known layers, not function"):
        pp.defense("ibp", lambda images: images, THREAT)
    two = pp.PatchThreat(SIZE, ((2, 2),), patches=2)
    with pytest.raises(InputError, match="ibp certifies against one patch, not 2"):
        IntervalBounds(network(), two)

    class Squared(ImageClassifier):
        def forward(self, images):
            return super().forward(images) ** 2

    own = Squared(
        nn.Sequential(nn.Flatten(), nn.Linear(144, 3)), mean=(0, 0), std=(1, 1), input_size=SIZE, num_classes=3
    )
    with pytest.raises(InputError, match="cannot pass the layer Squared"):
        IntervalBounds(own, THREAT)
    other = pp.PatchThreat((8, 8), ((2, 2),))
    for ask in (lambda defense, x: defense.predict(x), lambda defense, x: defense.certify(x, torch.tensor([0]))):
        with pytest.raises(CheckError, match=r"fails on images of \(2, 8, 8\).*is it built for that shape"):
            ask(IntervalBounds(network(), other), torch.zeros(1, 2, 8, 8))
    classifier = network().train()
    described = IntervalBounds(classifier, THREAT).describe()
    assert classifier.training
    assert json.loads(json.dumps(described))["patch_sizes"] == [[2, 3], [3, 2]]


def test_a_nan_bound_proves_nothing(generator):
    classifier, images = network(), torch.rand(2, 2, *SIZE, generator=generator)
    classifier.module[0].bias.data[0] = torch.nan
    found = IntervalBounds(classifier, THREAT).certify(images, torch.zeros(2, dtype=torch.int64))
    assert not found.certified.any()
    assert (found.margin == -torch.inf).all()
    assert (found.evidence["worst.label"] != 0).all()


def test_a_run_certifies_with_interval_bounds(generator, monkeypatch):
    classifier = load_classifier("cnn_ibp", "random", num_classes=3, input_size=(8, 8), seed=4)
    defense = pp.defense("ibp", classifier, pp.PatchThreat((8, 8), ((1, 1),)))
    images = [(torch.rand(3, 8, 8, generator=generator), i % 3) for i in range(6)]
    seen: list[int] = []
    forward = ImageClassifier.forward
    monkeypatch.setattr(ImageClassifier, "forward", lambda self, x: seen.append(len(x)) or forward(self, x))
    found = pp.certify(defense, images)
    assert sum(seen) < 200  # the classifier is checked on few copies: no certificate rests on its τ
    assert found.certified.n == 6
    assert defense.images_at_once <= 16, "an image takes a thousand passes: on a CPU, records come often"
    assert found.certified.k <= found.defended.k == found.undefended.k
    assert set(found.records[0].evidence["worst"]) == {"place", "label"}
