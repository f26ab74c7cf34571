"""Networks for the tests: the package's demonstration network, a plain module, and one whose labels bf16 changes."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

from patchproof.data import open_dataset
from patchproof.geometry import PatchThreat, covering_masks
from patchproof.models import ImageClassifier, load_classifier, save_checkpoint


def plain_network() -> nn.Module:
    """A user's own untrained module: no fill, no input size, no class names."""
    return nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(147, 64), nn.GELU(), nn.Linear(64, 10)).eval()


@cache
def plain_weights() -> dict[str, Tensor]:
    """Weights for `plain_network`: right on two of three test images, and certified on some."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network, source = plain_network(), open_dataset("fashion-mini", split="train")
        pixels, labels = torch.from_numpy(source.pixels[:3000]), torch.tensor(source.labels[:3000])
        keep = covering_masks(PatchThreat.square(image_size=(28, 28), percent=3), per_axis=3).keep()
        for step in range(300):
            rows, (first, second) = torch.randint(3000, (64,)), torch.randint(9, (2, 64))
            images = pixels[rows][:, None].expand(-1, 3, -1, -1) / 255
            masked = torch.where(keep[first] & keep[second], images, 0.5)
            loss = torch.nn.functional.cross_entropy(network(masked), labels[rows])
            slopes = torch.autograd.grad(loss, list(network.parameters()))
            with torch.no_grad():  # an optimiser of torch's takes seconds to import
                for weight, slope in zip(network.parameters(), slopes, strict=True):
                    weight -= 0.5 * (1 - step / 300) * slope
    return network.state_dict()


def plain_classifier() -> nn.Module:
    network = plain_network()
    network.load_state_dict(plain_weights())
    return network


class Startled(nn.Module):
    """A network of two labels. On dark images they differ by a sum that bf16 rounds by some hundredths; bright pixels
    give label 1."""

    fill = (0.25, 0.25, 0.25)

    def __init__(self) -> None:
        super().__init__()
        self.sum = nn.Linear(3 * 12 * 12, 1)
        nn.init.normal_(self.sum.weight, generator=torch.Generator().manual_seed(0))
        nn.init.constant_(self.sum.bias, 3 - 4.25 * float(self.sum.weight.detach().sum()))

    def forward(self, images: Tensor) -> Tensor:
        lead = self.sum(images.flatten(1) + 4).float()
        bright = (images - 0.6).relu().sum(dim=(1, 2, 3))[:, None]
        return torch.cat([lead, 1000 * bright], dim=1)


@cache
def fitted_classifier() -> ImageClassifier:
    """The demonstration network: right on most test images, and certified on half of them."""
    return load_classifier("small", "embedded").eval()


def fitted_checkpoint(folder: Path) -> Path:
    save_checkpoint(fitted_classifier(), folder)
    return folder
