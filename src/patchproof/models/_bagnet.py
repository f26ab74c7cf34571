"""BagNet (Brendel & Bethge 2019): a residual network of 1x1 convolutions with a few 3x3 ones, so that each cell of its
last feature map sees a small square of the image and nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from patchproof.models._small import BasicBlock, conv_norm

Block = tuple[int, int, int]
"""Width, kernel of its first convolution, stride."""


class BagNet(nn.Module):
    """A 3x3 stem, residual blocks of a k×k and a 1x1 convolution each, a linear layer on every cell.

    Logits are the mean of the local logits. All convolutions pad with zeros: cells at the border see less.
    """

    def __init__(self, num_classes: int = 10, *, channels: int = 3, blocks: Sequence[Block]) -> None:
        super().__init__()
        self.num_classes = num_classes
        widths = [blocks[0][0], *(width for width, _, _ in blocks)]
        self.stem = conv_norm(channels, widths[0], kernel=3)
        self.blocks = nn.Sequential(
            *(
                BasicBlock(inputs, width, stride=stride, kernels=(kernel, 1))
                for inputs, (width, kernel, stride) in zip(widths, blocks, strict=False)
            )
        )
        self.head = nn.Linear(widths[-1], num_classes)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    @property
    def receptive_field(self) -> tuple[int, int, int]:
        """(size, stride, offset): cell (r, q) sees rows offset + r·stride … + size − 1, columns likewise with q."""
        size, stride, offset = 1, 1, 0
        for layer in self._longest_path():
            size += (layer.kernel_size[0] - 1) * stride
            offset -= int(layer.padding[0]) * stride
            stride *= layer.stride[0]
        return size, stride, offset

    def _longest_path(self) -> Iterator[nn.Conv2d]:
        """The convolutions from the image to a cell; shortcuts see part of what these see."""
        for part in (self.stem, *(part for block in self.blocks for part in (block.first, block.second))):
            yield part[0]  # type: ignore[index, misc]

    def local_logits(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b classes rows columns"]:
        """Logits of every cell, of normalised images."""
        return self.head(self._features(images).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    def forward(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b classes"]:
        """The mean of the local logits, as the logits of the mean: the last layer is linear."""
        return self.head(self._features(images).mean(dim=(2, 3)))

    def _features(self, images: Tensor) -> Tensor:
        return self.blocks(functional.relu(self.stem(images)))

    def get_classifier(self) -> nn.Linear:
        """The last layer (timm's name for it)."""
        return self.head

    def reset_classifier(self, num_classes: int) -> None:
        """Put a fresh last layer for `num_classes` in place (timm's name for it)."""
        self.num_classes = num_classes
        self.head = nn.Linear(self.head.in_features, num_classes)


def small_blocks(field: int) -> list[Block]:
    """For images of 32 pixels: one cell per pixel, which sees field×field pixels (odd, at least 3)."""
    return [(96, 3, 1)] * ((field - 3) // 2) + [(256, 1, 1)] * 4


def large_blocks(field: int) -> list[Block]:
    """For images of 224 pixels: one cell for 8×8 pixels, which sees 17×17 or 33×33, as in the paper."""
    return [
        block
        for width, kernel, stride in ((128, 3, 2), (256, 3, 2), (512, 3, 2), (512, 3 if field == 33 else 1, 1))
        for block in ((width, kernel, stride), (width, 1, 1))
    ]
