"""`small`: a residual network for images of 28 to 64 pixels that trains in a minute on two CPU cores."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from patchproof.models._classifier import ImageClassifier
from patchproof.types import Size

WIDTHS = (16, 32, 64)
FASHION_MEAN, FASHION_STD = 0.286, 0.353


class SmallResNet(nn.Module):
    """Stem of stride 2, three stages of two basic blocks (He et al. 2016), mean over positions, one linear layer."""

    def __init__(self, num_classes: int = 10, *, channels: int = 3) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.stem = _conv_norm(channels, WIDTHS[0], kernel=3, stride=2)
        stages = []
        for inputs, outputs in zip((WIDTHS[0], *WIDTHS), WIDTHS, strict=False):
            first = BasicBlock(inputs, outputs, stride=1 if inputs == outputs else 2)
            stages.append(nn.Sequential(first, BasicBlock(outputs, outputs, stride=1)))
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(WIDTHS[-1], num_classes)
        # A third faster on CPUs: every convolution then keeps its output in this layout.
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b classes"]:
        """Logits of normalised images."""
        features = self.stages(functional.relu(self.stem(images)))
        return self.head(features.mean(dim=(2, 3)))

    def get_classifier(self) -> nn.Linear:
        """The last layer (timm's name for it)."""
        return self.head

    def reset_classifier(self, num_classes: int) -> None:
        """Put a fresh last layer for `num_classes` in place (timm's name for it)."""
        self.num_classes = num_classes
        self.head = nn.Linear(WIDTHS[-1], num_classes)


class BasicBlock(nn.Module):
    """relu(x + f(x)) with f two 3x3 convolutions; a 1x1 convolution on x where the shape changes."""

    def __init__(self, inputs: int, outputs: int, *, stride: int) -> None:
        super().__init__()
        self.first = _conv_norm(inputs, outputs, kernel=3, stride=stride)
        self.second = _conv_norm(outputs, outputs, kernel=3, stride=1)
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else _conv_norm(inputs, outputs, kernel=1, stride=stride)

    def forward(self, features: Float[Tensor, "b c h w"]) -> Float[Tensor, "b d h2 w2"]:
        """The block's output."""
        return functional.relu(self.shortcut(features) + self.second(functional.relu(self.first(features))))


def build_small(
    *, num_classes: int | None = None, input_size: Size | None = None, channels: int | None = None
) -> ImageClassifier:
    """`small` with fresh weights; normalised as Fashion-MNIST unless its settings are replaced."""
    channels, classes = channels or 3, num_classes or 10
    return ImageClassifier(
        SmallResNet(classes, channels=channels),
        mean=(FASHION_MEAN,) * channels,
        std=(FASHION_STD,) * channels,
        input_size=input_size or (28, 28),
        num_classes=classes,
        interpolation="bilinear",
        architecture="small",
    )


def _conv_norm(inputs: int, outputs: int, *, kernel: int, stride: int) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs))
