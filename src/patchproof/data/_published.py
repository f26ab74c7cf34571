"""The embedded slice of Fashion-MNIST, and what torchvision reads or fetches: CIFAR, SVHN, ImageNette."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import numpy as np

from patchproof.data._sources import ArraySource

FASHION_CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)

OFFICIAL_SPLITS = {
    "cifar10": ("train", "test"),
    "cifar100": ("train", "test"),
    "svhn": ("train", "test", "extra"),
    "fashion-mini": ("train", "test"),
}


def open_fashion_mini(split: str) -> ArraySource:
    """5,000 training or 1,000 test images of Fashion-MNIST, equally many of each class, in the official order."""
    with files("patchproof").joinpath("embedded", "fashion_mini.npz").open("rb") as file:
        arrays = np.load(file, allow_pickle=False)
        pixels, labels = arrays[f"{split}_images"], arrays[f"{split}_labels"]
    return ArraySource("fashion-mini", split, FASHION_CLASSES, tuple(labels.tolist()), pixels)


def official_file(name: str, split: str) -> str:
    """What lies under torchvision's root when `split` is there."""
    return {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}.get(name, f"{split}_32x32.mat")


def open_official(name: str, root: Path, split: str, *, download: bool) -> ArraySource:
    """The set as torchvision reads it, which checks md5 sums before it unpickles anything."""
    from torchvision import datasets

    if name == "svhn":
        svhn = datasets.SVHN(root, split=split, download=download)
        return ArraySource(
            name, split, tuple("0123456789"), tuple(svhn.labels.tolist()), svhn.data.transpose(0, 2, 3, 1)
        )
    kind = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}[name]
    cifar = kind(root, train=split == "train", download=download)
    return ArraySource(name, split, tuple(cifar.classes), tuple(cifar.targets), cifar.data)


def download_imagenette(root: Path) -> None:
    """The full-size ImageNette, both splits, to `<root>/imagenette2`."""
    from torchvision import datasets

    datasets.Imagenette(root, split="val", size="full", download=True)
