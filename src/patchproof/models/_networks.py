"""The package's own networks by name, for images of about 32 pixels unless the name says 224. Only `small` comes with
weights."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional

from patchproof.types import Size

RESNET18 = (64, 128, 256, 512)

Block = tuple[int, int, int]
"""A block of a BagNet: width, kernel of its first convolution, stride."""


def relu(features: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
    """ReLU, in place if no gradient is recorded, which saves 4% of a pass of `small` on a CPU."""
    return functional.relu(features, inplace=not torch.is_grad_enabled())


def conv_norm(inputs: int, outputs: int, *, kernel: int, stride: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs))


class BasicBlock(nn.Module):
    """relu(x + f(x)) with f two convolutions (3x3 by default); a 1x1 convolution on x if the shape changes."""

    def __init__(self, inputs: int, outputs: int, *, stride: int, kernels: tuple[int, int] = (3, 3)) -> None:
        super().__init__()
        self.first = conv_norm(inputs, outputs, kernel=kernels[0], stride=stride)
        self.second = conv_norm(outputs, outputs, kernel=kernels[1])
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else conv_norm(inputs, outputs, kernel=1, stride=stride)

    def forward(self, features: Float[Tensor, "b c h w"]) -> Float[Tensor, "b d h2 w2"]:
        return relu(self.shortcut(features) + self.second(relu(self.first(features))))


class Residual(nn.Module):
    """Feature maps, their mean over positions, one linear layer. The methods on `head` have timm's names."""

    head: nn.Linear

    @abstractmethod
    def features(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b d rows columns"]:
        """The last feature maps for normalised images."""

    def forward(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b classes"]:
        """Logits of normalised images."""
        return self.head(self.features(images).mean(dim=(2, 3)))

    def get_classifier(self) -> nn.Linear:
        return self.head

    def reset_classifier(self, num_classes: int) -> None:
        self.num_classes = num_classes
        self.head = nn.Linear(self.head.in_features, num_classes)


class SmallResNet(Residual):
    """A 3x3 stem, then stages of two basic blocks (He et al. 2016): `small`, which trains in a minute on two CPU cores.

    With widths 64 to 512 and a stem of stride 1 it is the ResNet-18 for images of 32 pixels.
    """

    def __init__(
        self, num_classes: int = 10, *, channels: int = 3, widths: Sequence[int] = (16, 32, 64), stride: int = 2
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

    def features(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b d rows columns"]:
        return self.stages(relu(self.stem(images)))


class AblatedResNet(SmallResNet):
    """A residual network that sees [x, 1 - x], with zeros where a pixel is hidden: so hidden differs from black
    (Levine & Feizi 2020). Its images are in [0, 1]: it is wrapped with mean 0 and std 1."""

    def __init__(self, num_classes: int = 10, *, widths: Sequence[int] = RESNET18) -> None:
        super().__init__(num_classes, channels=6, widths=widths, stride=1)

    def forward(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b classes"]:
        """Logits of images without hidden pixels."""
        return super().forward(torch.cat([images, 1 - images], dim=1))

    def masked(self, images: Float[Tensor, "b c h w"], keep: Bool[Tensor, "b 1 h w"]) -> Float[Tensor, "b classes"]:
        """Logits of the pixels that `keep` leaves visible."""
        return super().forward(torch.cat([images, 1 - images], dim=1).where(keep, 0))


class BagNet(Residual):
    """A residual network of 1x1 and a few k×k convolutions (Brendel & Bethge 2019): each cell of its last feature map
    sees only a small square of the image.

    Its logits are the mean of the local logits, computed as the logits of the mean feature, since the last layer is
    linear. Convolutions pad with zeros, so cells at the border see less.
    """

    def __init__(self, num_classes: int = 10, *, blocks: Sequence[Block]) -> None:
        super().__init__()
        self.num_classes = num_classes
        widths = [blocks[0][0], *(width for width, _, _ in blocks)]
        self.stem = conv_norm(3, widths[0], kernel=3)
        self.blocks = nn.Sequential(
            *(
                BasicBlock(inputs, width, stride=stride, kernels=(kernel, 1))
                for inputs, (width, kernel, stride) in zip(widths, blocks, strict=False)
            )
        )
        self.head = nn.Linear(widths[-1], num_classes)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def features(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b d rows columns"]:
        return self.blocks(relu(self.stem(images)))

    @property
    def receptive_field(self) -> tuple[int, int, int]:
        """(size, stride, offset): cell (r, q) sees rows offset + r·stride … + size − 1, and columns likewise with q."""
        size, stride, offset = 1, 1, 0
        # The longest path from the image to a cell; shortcuts see part of what it sees.
        parts: list[Any] = [self.stem, *(part for block in self.blocks for part in (block.first, block.second))]
        for convolution, _ in parts:
            size += (convolution.kernel_size[0] - 1) * stride
            offset -= convolution.padding[0] * stride
            stride *= convolution.stride[0]
        return size, stride, offset

    def local_logits(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b classes rows columns"]:
        """Logits of every cell, for normalised images."""
        return self.head(self.features(images).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def large_blocks(field: int) -> list[Block]:
    """Blocks for images of 224 pixels: one cell per 8×8 pixels, which sees 17×17 or 33×33, as in the paper."""
    last_kernel = 3 if field == 33 else 1
    stages = [(128, 3, 2), (256, 3, 2), (512, 3, 2), (512, last_kernel, 1)]
    return [block for stage in stages for block in (stage, (stage[0], 1, 1))]


class IntervalNetwork(nn.Sequential):
    """Four convolutions and two linear layers with ReLU between them: every layer can be passed by interval bounds."""

    def __init__(self, num_classes: int = 10, *, input_size: Size = (32, 32)) -> None:
        convolutions = [
            nn.Conv2d(3, 64, 3, padding=1),
            nn.Conv2d(64, 64, 4, stride=2, padding=1),
            nn.Conv2d(64, 128, 3, padding=1),
            nn.Conv2d(128, 128, 4, stride=2, padding=1),
        ]
        cells = (input_size[0] // 4) * (input_size[1] // 4)
        linear = [nn.Flatten(), nn.Linear(128 * cells, 512), nn.ReLU(), nn.Linear(512, num_classes)]
        super().__init__(*(part for layer in convolutions for part in (layer, nn.ReLU())), *linear)
        self.num_classes = num_classes
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def get_classifier(self) -> nn.Module:
        return self[-1]

    def reset_classifier(self, num_classes: int) -> None:
        self.num_classes = num_classes
        self[-1] = nn.Linear(512, num_classes)


def small_vit(num_classes: int = 10, *, input_size: Size = (32, 32)) -> nn.Module:
    """timm's VisionTransformer with patches of 4 pixels: 64 tokens of 256 numbers at 32 pixels, 8 blocks."""
    from timm.models.vision_transformer import VisionTransformer

    size: Any = input_size
    return VisionTransformer(img_size=size, patch_size=4, num_classes=num_classes, embed_dim=256, depth=8, num_heads=4)


@dataclass(frozen=True)
class Network:
    """A named network: `make(num_classes)`, with `input_size=…` as well if it is `sized`, and how images are prepared.

    Mean and std are those of the images it is for, by default CIFAR-10's.
    """

    make: Callable[..., nn.Module]
    input_size: Size = (32, 32)
    mean: tuple[float, ...] = (0.4914, 0.4822, 0.4465)
    std: tuple[float, ...] = (0.2470, 0.2435, 0.2616)
    sized: bool = False


NETWORKS: Mapping[str, Network] = {
    "small": Network(SmallResNet, (28, 28), (0.286,) * 3, (0.353,) * 3),
    "resnet18_32": Network(partial(SmallResNet, widths=RESNET18, stride=1)),
    "resnet18_ablated": Network(AblatedResNet, mean=(0.0,) * 3, std=(1.0,) * 3),
    "vit_patch4_32": Network(small_vit, sized=True),
    "cnn_ibp": Network(IntervalNetwork, sized=True),
    **{  # one cell per pixel, which sees field×field pixels
        f"bagnet{field}": Network(partial(BagNet, blocks=[(96, 3, 1)] * ((field - 3) // 2) + [(256, 1, 1)] * 4))
        for field in (5, 7, 9, 11, 13, 17)
    },
    "bagnet5_wide": Network(partial(BagNet, blocks=[(192, 3, 1)] + [(512, 1, 1)] * 4)),
    **{
        f"bagnet{field}_224": Network(
            partial(BagNet, blocks=large_blocks(field)), (224, 224), (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
        )
        for field in (17, 33)
    },
}
"""Names that `load_classifier` knows in addition to timm's."""


def is_own(model: str) -> bool:
    """True if the model is named by a factory of the user's (`file.py:factory`), not by an architecture."""
    return ":" in model
