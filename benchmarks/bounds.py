"""How much faster interval bounds are where only what a patch reaches is bounded (`models.margin_bounds`).

    python benchmarks/bounds.py --output benchmarks/results/bounds-cpu.json

The peer bounds whole feature maps for every location of the patch, as the published code does. Both take turns.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from typing import Any, cast

import torch
from common import DEVICE, machine, parser, write
from torch import Tensor, nn
from torch.nn import functional

import patchproof as pp
from patchproof.geometry import inside
from patchproof.models import ImageClassifier, load_classifier, margin_bounds, passable_layers
from patchproof.training.losses import IntervalLoss

SECONDS, TURNS, IMAGES, LOCATIONS = 3, 3, 32, 20


def whole_maps(classifier: ImageClassifier, images: Tensor, labels: Tensor, owner: Tensor, windows: Tensor) -> Tensor:
    """Lower bounds of logit_y − logit_c, for convolutions, ReLU and linear layers, without rounding errors."""
    patch = inside(windows, (images.shape[2], images.shape[3]))
    middle, radius = images[owner].masked_fill(patch, 0.5), 0.5 * patch.to(images).expand(-1, images.shape[1], -1, -1)
    _, *layers, last = cast(list[Any], passable_layers(classifier))
    mean, std = (values.view(-1, 1, 1) for values in (classifier.mean, classifier.std))
    middle, radius = (middle - mean) / std, radius / std
    for layer in layers:
        if isinstance(layer, nn.ReLU):
            lower, upper = (middle - radius).relu(), (middle + radius).relu()
            middle, radius = (upper + lower) / 2, (upper - lower) / 2
        elif isinstance(layer, nn.Conv2d):
            radius = functional.conv2d(radius, layer.weight.abs(), None, layer.stride, layer.padding)
            middle = layer(middle)
        elif isinstance(layer, nn.Linear):
            radius = radius @ layer.weight.abs().T
            middle = layer(middle)
        else:
            middle, radius = layer(middle), layer(radius)
    difference = last.weight[labels][:, None] - last.weight
    bound = (difference @ middle[:, :, None])[:, :, 0] + last.bias[labels][:, None] - last.bias
    return bound - (difference.abs() @ radius[:, :, None])[:, :, 0]


def rate(work: Callable[[], object]) -> float:
    """Repetitions per second."""
    started, done = time.perf_counter(), 0
    while time.perf_counter() - started < SECONDS:
        work()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        done += 1
    return done / (time.perf_counter() - started)


def ways(pixels: int) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """The peer's way and ours, for certificates and for steps of training."""
    loss = IntervalLoss(pp.PatchThreat((32, 32), ((pixels, pixels),)), positions=LOCATIONS)
    classifier = load_classifier("cnn_ibp", "random", num_classes=10).to(DEVICE).eval()
    exact = copy.deepcopy(classifier).double()
    images, labels = torch.rand(IMAGES, 3, 32, 32, device=DEVICE), torch.randint(10, (IMAGES,), device=DEVICE)
    owner = torch.arange(IMAGES, device=DEVICE).repeat(LOCATIONS)
    windows, every = loss.places(len(owner)).to(DEVICE), labels[owner]

    @torch.no_grad()
    def certificate(way: Callable[..., Tensor]) -> Tensor:
        return way(exact, images.double(), every, owner, windows)

    def peer_step() -> None:
        bounds = whole_maps(classifier, images, every, owner, loss.places(len(owner)).to(DEVICE))
        worst = bounds.unflatten(0, (LOCATIONS, -1)).amin(dim=0)
        functional.cross_entropy(-worst, labels).backward()

    torch.testing.assert_close(certificate(margin_bounds), certificate(whole_maps), rtol=1e-6, atol=1e-3)
    return {
        "certificate": (lambda: certificate(whole_maps), lambda: certificate(margin_bounds)),
        "training step": (peer_step, lambda: loss(classifier, images, labels, 1.0).backward()),
    }


def main() -> None:
    arguments, rows = parser(__doc__).parse_args(), []
    for pixels in (2, 5):
        for what, pair in ways(pixels).items():
            for work in pair:
                work()
            turns = [[rate(work) for work in pair] for _ in range(TURNS)]
            ratios = [ours / peer for peer, ours in turns]
            rows.append({"patch": f"{pixels}×{pixels}", "what": what, "ratios": ratios, "turns": turns})
            print(
                f"{pixels}×{pixels}, {what}: {statistics.median(ratios):.1f} times as fast (least: {min(ratios):.1f})"
            )
    settings = {"model": "cnn_ibp", "images": IMAGES, "locations": LOCATIONS}
    write({**machine(DEVICE), **settings, "rows": rows}, arguments.output)


if __name__ == "__main__":
    main()
