"""Interval bounds: no image between the bounds leaves them, and a network that cannot be bounded is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import patchproof as pp
import reference
from patchproof.geometry import all_places, inside
from patchproof.models import ImageClassifier, load_classifier, margin_bounds
from patchproof.models._bounds import Interval, Reached
from patchproof.models._classifier import seeded
from patchproof.types import InputError


def network() -> ImageClassifier:
    """Every layer that bounds pass, with generic weights."""
    with seeded(5):
        parts = nn.Sequential(
            nn.Sequential(nn.Conv2d(3, 6, 3, stride=2, padding=1), nn.BatchNorm2d(6), nn.ReLU()),
            nn.Identity(),
            nn.Conv2d(6, 6, 3, padding="same", groups=2, bias=False),
            nn.ReLU(),
            nn.AvgPool2d(3, 2, padding=1),
            nn.Flatten(),
            nn.Linear(24, 12),
            nn.BatchNorm1d(12, affine=False),
            nn.ReLU(),
            nn.Linear(12, 4),
        )
        for part in parts.modules():
            if isinstance(part, nn.BatchNorm1d | nn.BatchNorm2d):
                part.running_mean.uniform_(-1, 1)
                part.running_var.uniform_(0.5, 2)
    mean, std = (0.2, 0.5, 0.7), (0.3, 0.2, 0.1)
    return ImageClassifier(parts, mean=mean, std=std, input_size=(8, 8), num_classes=4).eval()


def ends(images: Tensor, owner: Tensor, windows: Tensor) -> tuple[Tensor, Tensor]:
    """The images with black and with white windows."""
    shown, patch = images[owner], inside(windows, tuple(images.shape[2:]))
    return shown.masked_fill(patch, 0), shown.masked_fill(patch, 1)


WINDOWS = torch.tensor([(2, 3, 1, 1), (0, 0, 2, 3), (6, 5, 2, 3), (3, 0, 5, 8), (0, 0, 8, 8)])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("folded", [True, False])
def test_no_window_leaves_the_bounds(dtype, folded, generator):
    classifier = network()
    if not folded:
        classifier.module = classifier.module[:6]  # a composition that does not end in a linear layer
    classifier.module.to(dtype)
    images = torch.rand(3, 3, 8, 8, generator=generator, dtype=dtype)
    owner, labels = torch.tensor([0, 1, 1, 2, 0]), torch.tensor([0, 1, 2, 3, 1])
    for window in (WINDOWS[:3], WINDOWS):
        n = len(window)
        bound = margin_bounds(classifier, images, labels[:n], owner[:n], window)
        lower, upper = ends(images, owner[:n], window)
        shares = torch.rand(200, 1, 3, 8, 8, generator=generator, dtype=dtype).round(decimals=0)  # corners
        every = torch.cat([lower + shares * (upper - lower), (lower + upper)[None] / 2, lower[None], upper[None]])
        logits = classifier(every.flatten(0, 1)).unflatten(0, every.shape[:2])
        margin = logits.gather(2, labels[:n].expand(len(every), -1)[..., None]) - logits
        assert (margin >= bound).all()
        assert (margin.amin(dim=0) - bound).amax() > 0.01
        still = margin_bounds(classifier, images, labels[:n], owner[:n], window, share=0.0)
        shown = classifier(images[owner[:n]])
        margin = shown.gather(1, labels[:n, None]) - shown
        assert (margin >= still).all()
        torch.testing.assert_close(still, margin, atol=1e-2 if dtype == torch.float32 else 1e-9, rtol=0)


def convolutions(*how: dict[str, Any]) -> nn.Sequential:
    return nn.Sequential(*(part for each in how for part in (nn.Conv2d(4, 4, **each), nn.ReLU())))


@pytest.mark.parametrize(
    "layers",
    [
        convolutions({"kernel_size": 3, "padding": 1}, {"kernel_size": 3, "stride": 2, "padding": 1}),
        convolutions({"kernel_size": 4, "stride": 2, "padding": 1}, {"kernel_size": 3, "padding": 1}),
        convolutions({"kernel_size": (1, 3), "stride": (2, 1), "padding": (0, 2), "groups": 2}, {"kernel_size": 2}),
        convolutions({"kernel_size": 3, "dilation": 2, "padding": 2}, {"kernel_size": 1, "stride": 3}),
        convolutions({"kernel_size": 3, "padding": "same"}, {"kernel_size": (5, 2), "stride": (1, 2)}),
        nn.Sequential(nn.BatchNorm2d(4), *convolutions({"kernel_size": 3, "stride": 2}), nn.AvgPool2d(2, 1)),
    ],
)
def test_bounds_where_a_window_reaches_are_those_of_whole_maps(layers, generator):
    """For windows of different sizes at every place of an image that is not square, and for their gradients."""
    size = (13, 17)
    first = nn.Conv2d(2, 4, 3, padding=1)
    cells = layers(torch.zeros(1, 4, *size)).numel()
    parts = nn.Sequential(first, nn.ReLU(), layers, nn.Flatten(), nn.Linear(cells, 3)).double().eval()
    classifier = ImageClassifier(parts, mean=(0.3, 0.6), std=(0.4, 0.3), input_size=size, num_classes=3).eval()
    images = torch.rand(2, 2, *size, generator=generator, dtype=torch.float64)
    windows = torch.cat([all_places(pp.PatchThreat(size, (patch,)))[:: len(patch) + 3] for patch in ((3, 2), (1, 4))])
    windows = windows[torch.randperm(len(windows), generator=generator)]
    owner, labels = torch.arange(len(windows)) % 2, torch.arange(len(windows)) % 3
    found = margin_bounds(classifier, images, labels, owner, windows, rounding=False)
    lower, upper = ends(images, owner, windows)
    every = [
        reference.interval_margins(classifier, lower[i : i + 1], upper[i : i + 1], int(labels[i]))
        for i in range(len(windows))
    ]
    expected = torch.cat(every)
    torch.testing.assert_close(found, expected)
    weights = [value for value in classifier.parameters() if value.requires_grad]
    slopes = torch.autograd.grad(found.square().sum(), weights)
    for slope, wanted in zip(slopes, torch.autograd.grad(expected.square().sum(), weights), strict=True):
        torch.testing.assert_close(slope, wanted)


def gamma(terms: int) -> float:
    """A sum of so many products of float64 numbers is off by at most this share of Σ|w·x| (Higham 2002, §3.1)."""
    unit = torch.finfo(torch.float64).eps / 2
    return terms * unit / (1 - terms * unit)


@pytest.mark.parametrize(
    ("layer", "terms", "local"),
    [
        (nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2), 18, True),
        (nn.Conv2d(4, 6, 3, padding="same"), 36, False),
        (nn.AvgPool2d(2), 4, False),
        (nn.BatchNorm2d(4), 3, True),
        (nn.ReLU(), 1, True),
    ],
)
def test_a_layer_widens_its_intervals_by_more_than_twice_its_rounding_error(layer, terms, local, generator):
    """On the cells that a patch reaches, and on the others. Only what is local is bounded cell by cell."""
    layer, absolute = layer.double().eval(), copy.deepcopy(layer).double().eval()
    for weight in absolute.parameters():
        weight.data.abs_()
    clean = torch.rand(2, 2, 4, 13, 17, generator=generator, dtype=torch.float64)
    part = torch.rand(2, 3, 4, 2, 3, generator=generator, dtype=torch.float64)
    corner = torch.tensor([(0, 0), (5, 7), (11, 14)])
    x = Reached(Interval(*clean), Interval(*part), torch.tensor([0, 1, 1]), corner)
    passed = [x.passed(layer, rounding=rounding) for rounding in (True, False)]
    assert [isinstance(each, Reached) for each in passed] == [local] * 2
    found, exact = (each.whole() if isinstance(each, Reached) else each for each in passed)
    largest = absolute(x.whole().middle + x.whole().radius)
    assert (found.radius - exact.radius > 2 * gamma(terms) * largest).all()


def test_the_last_layer_widens_margins_by_more_than_twice_its_rounding_error(generator):
    classifier = nn.Sequential(nn.Flatten(), nn.Linear(192, 3)).double()
    images, number = torch.rand(1, 3, 8, 8, generator=generator, dtype=torch.float64), torch.tensor([0])
    found, exact = (
        margin_bounds(classifier, images, number, number, WINDOWS[-1:], rounding=rounding)[0]
        for rounding in (True, False)
    )
    largest = classifier[1].weight.abs().sum(dim=1) + classifier[1].bias.abs()  # pixels are up to 1
    assert (exact - found > 2 * gamma(192) * (largest + largest[0])).all()


def test_the_bound_of_one_linear_layer_is_attained():
    """Bounds of each logit by itself would be lower."""
    with seeded(1):
        classifier = nn.Sequential(nn.Flatten(), nn.Linear(12, 3)).double()
    weight, bias = classifier[1].weight, classifier[1].bias
    images, everything = torch.rand(1, 3, 2, 2, dtype=torch.float64), torch.tensor([(0, 0, 2, 2)])
    found = margin_bounds(classifier, images, torch.tensor([2]), torch.tensor([0]), everything)[0]
    expected = (weight[2] - weight).clamp(max=0).sum(dim=1) + bias[2] - bias
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


def bounded(classifier: nn.Module) -> Tensor:
    number = torch.tensor([0])
    return margin_bounds(classifier, torch.rand(1, 3, 8, 8), number, number, WINDOWS[:1])


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.GELU(), "cannot pass the layer GELU, only Conv2d, .*Linear"),
        (nn.BatchNorm2d(3).train(), "the layer BatchNorm2d in training mode"),
        (nn.Conv2d(3, 3, 3, padding=1, padding_mode="reflect"), r"Conv2d \(Conv2d\(3, .*padding_mode=reflect"),
    ],
)
def test_other_layers_are_refused_by_name(layer, message):
    with pytest.raises(InputError, match=message):
        bounded(nn.Sequential(layer, nn.Flatten(), nn.Linear(192, 2)))
    with pytest.raises(InputError, match="cannot pass the layer SmallResNet"):
        bounded(load_classifier("small", "random"))
    hooked = nn.ReLU()
    hooked.register_forward_pre_hook(lambda _, inputs: (2 * inputs[0],))
    classifier = load_classifier("cnn_ibp", "random", num_classes=2, input_size=(8, 8))
    classifier.register_forward_hook(lambda *values: -values[-1])
    with pytest.raises(InputError, match="cannot see what the hooks of a ImageClassifier do"):
        bounded(classifier)
    with pytest.raises(InputError, match="cannot see what the hooks of a ReLU do"):
        bounded(nn.Sequential(hooked, nn.Flatten(), nn.Linear(192, 2)))
    replaced = nn.ReLU()
    replaced.forward = lambda x: -x
    with pytest.raises(InputError, match="cannot see what a ReLU with a `forward` of its own does"):
        bounded(nn.Sequential(replaced, nn.Flatten(), nn.Linear(192, 2)))


def test_layers_in_an_order_that_gives_no_logits_are_refused_with_the_way_out():
    columns = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Flatten(), nn.Linear(96, 2))
    with pytest.raises(InputError, match=r"the layer Linear\(in_features=8.* before a Flatten.*; put a Flatten"):
        bounded(columns)
    with pytest.raises(InputError, match="need one logit per class, but this Sequential has no Flatten"):
        bounded(nn.Sequential(nn.Conv2d(3, 2, 3), nn.ReLU()))
