"""Residual networks for small images: `small`, which trains in a minute on two CPU cores, and ResNet-18."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional

WIDTHS = (16, 32, 64)
RESNET18 = (64, 128, 256, 512)


class SmallResNet(nn.Module):
    """A 3x3 stem, stages of two basic blocks (He et al. 2016), mean over positions, one linear layer.

    With the widths 64 to 512 and a stem of stride 1 it is the ResNet-18 for images of 32 pixels.
    """

    def __init__(
        self, num_classes: int = 10, *, channels: int = 3, widths: Sequence[int] = WIDTHS, stride: int = 2
    ) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.stem = conv_norm(channels, widths[0], kernel=3, stride=stride)
        stages = []
        for inputs, outputs in zip((widths[0], *widths), widths, strict=False):
            first = BasicBlock(inputs, outputs, stride=1 if inputs == outputs else 2)
            stages.append(nn.Sequential(first, BasicBlock(outputs, outputs, stride=1)))
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(widths[-1], num_classes)
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
        self.head = nn.Linear(self.head.in_features, num_classes)


class AblatedResNet(SmallResNet):
    """A residual network that sees [x, 1 - x] with zeros where a pixel is hidden, so that hidden differs from black
    (Levine & Feizi 2020). Its images are in [0, 1]: it is wrapped with mean 0 and std 1."""

    def __init__(self, num_classes: int = 10, *, channels: int = 3, widths: Sequence[int] = RESNET18) -> None:
        super().__init__(num_classes, channels=2 * channels, widths=widths, stride=1)

    def forward(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b classes"]:
        """Logits of images without hidden pixels."""
        return super().forward(torch.cat([images, 1 - images], dim=1))

    def masked(self, images: Float[Tensor, "b c h w"], keep: Bool[Tensor, "b 1 h w"]) -> Float[Tensor, "b classes"]:
        """Logits of what `keep` leaves visible."""
        return super().forward(torch.cat([images, 1 - images], dim=1).where(keep, 0))


class BasicBlock(nn.Module):
    """relu(x + f(x)) with f two convolutions, of 3x3 each; a 1x1 convolution on x where the shape changes."""

    def __init__(self, inputs: int, outputs: int, *, stride: int, kernels: tuple[int, int] = (3, 3)) -> None:
        super().__init__()
        self.first = conv_norm(inputs, outputs, kernel=kernels[0], stride=stride)
        self.second = conv_norm(outputs, outputs, kernel=kernels[1])
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else conv_norm(inputs, outputs, kernel=1, stride=stride)

    def forward(self, features: Float[Tensor, "b c h w"]) -> Float[Tensor, "b d h2 w2"]:
        """The block's output."""
        return functional.relu(self.shortcut(features) + self.second(functional.relu(self.first(features))))


def conv_norm(inputs: int, outputs: int, *, kernel: int, stride: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs))
