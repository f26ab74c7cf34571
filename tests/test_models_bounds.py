"""Interval bounds: no image between the bounds leaves them, and a network that cannot be bounded is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from patchproof.models import ImageClassifier, load_classifier, margin_bounds
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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("folded", [True, False])
def test_no_image_between_the_bounds_leaves_them(dtype, folded, generator):
    classifier = network()
    if not folded:
        classifier.module = classifier.module[:6]  # a composition that does not end in a linear layer
    classifier.module.to(dtype)
    lower, upper = torch.rand(2, 5, 3, 8, 8, generator=generator, dtype=dtype).sort(dim=0).values
    lower[0] = upper[0]  # a single point
    labels = torch.tensor([0, 1, 2, 3, 1])
    bound = margin_bounds(classifier, lower, upper, labels)
    shares = torch.rand(200, 1, 3, 8, 8, generator=generator, dtype=dtype).round(decimals=0)  # corners
    inside = torch.cat([lower + shares * (upper - lower), (lower + upper)[None] / 2, lower[None], upper[None]])
    logits = classifier(inside.flatten(0, 1).clamp(0, 1)).unflatten(0, inside.shape[:2])
    margin = logits.gather(2, labels.expand(len(inside), -1)[..., None]) - logits
    assert (margin >= bound).all()
    assert (margin[:, 1:].amin(dim=0) - bound[1:]).amax() > 0.01
    torch.testing.assert_close(bound[0], margin[-1, 0], atol=1e-2 if dtype == torch.float32 else 1e-9, rtol=0)


def test_the_bound_of_one_linear_layer_is_attained():
    """Bounds of each logit by itself would be lower."""
    with seeded(1):
        classifier = nn.Sequential(nn.Flatten(), nn.Linear(12, 3)).double()
    weight, bias = classifier[1].weight, classifier[1].bias
    lower, upper = torch.zeros(1, 3, 2, 2, dtype=torch.float64), torch.ones(1, 3, 2, 2, dtype=torch.float64)
    found = margin_bounds(classifier, lower, upper, torch.tensor([2]))[0]
    expected = (weight[2] - weight).clamp(max=0).sum(dim=1) + bias[2] - bias
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.GELU(), "cannot pass the layer GELU, only Conv2d, .*Linear"),
        (nn.BatchNorm2d(3).train(), "the layer BatchNorm2d in training mode"),
        (nn.Conv2d(3, 3, 3, padding=1, padding_mode="reflect"), r"Conv2d \(Conv2d\(3, .*padding_mode=reflect"),
    ],
)
def test_other_layers_are_refused_by_name(layer, message):
    image = torch.rand(1, 3, 8, 8)
    with pytest.raises(InputError, match=message):
        margin_bounds(nn.Sequential(layer, nn.Flatten(), nn.Linear(192, 2)), image, image, torch.tensor([0]))
    with pytest.raises(InputError, match="cannot pass the layer SmallResNet"):
        margin_bounds(load_classifier("small", "random"), image, image, torch.tensor([0]))
    hooked = nn.ReLU()
    hooked.register_forward_pre_hook(lambda _, inputs: (2 * inputs[0],))
    classifier = load_classifier("cnn_ibp", "random", num_classes=2, input_size=(8, 8))
    classifier.register_forward_hook(lambda *values: -values[-1])
    with pytest.raises(InputError, match="cannot see what the hooks of a ImageClassifier do"):
        margin_bounds(classifier, image, image, torch.tensor([0]))
    with pytest.raises(InputError, match="cannot see what the hooks of a ReLU do"):
        margin_bounds(nn.Sequential(hooked, nn.Flatten(), nn.Linear(192, 2)), image, image, torch.tensor([0]))
    replaced = nn.ReLU()
    replaced.forward = lambda x: -x
    with pytest.raises(InputError, match="cannot see what a ReLU with a `forward` of its own does"):
        margin_bounds(nn.Sequential(replaced, nn.Flatten(), nn.Linear(192, 2)), image, image, torch.tensor([0]))


def test_layers_in_an_order_that_gives_no_logits_are_refused_with_the_way_out():
    image = torch.rand(1, 3, 8, 8)
    columns = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Flatten(), nn.Linear(96, 2))
    with pytest.raises(InputError, match=r"the layer Linear\(in_features=8.* before a Flatten.*; put a Flatten"):
        margin_bounds(columns, image, image, torch.tensor([0]))
    with pytest.raises(InputError, match="need one logit per class, but this Sequential has no Flatten"):
        margin_bounds(nn.Sequential(nn.Conv2d(3, 2, 3), nn.ReLU()), image, image, torch.tensor([0]))
