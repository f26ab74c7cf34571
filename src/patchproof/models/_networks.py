"""The package's own networks by name, for images of about 32 pixels unless their name says 224; none has weights to
start from but `small`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from patchproof.models._bagnet import BagNet, large_blocks, small_blocks
from patchproof.models._small import RESNET18, AblatedResNet, SmallResNet
from patchproof.types import Size

CIFAR_MEAN, CIFAR_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
FASHION_MEAN, FASHION_STD = (0.286,) * 3, (0.353,) * 3


class IntervalNetwork(nn.Sequential):
    """Four convolutions and two linear layers with ReLU between them: nothing that interval bounds cannot pass."""

    def __init__(self, num_classes: int = 10, *, channels: int = 3, input_size: Size = (32, 32)) -> None:
        convolutions = [
            nn.Conv2d(channels, 64, 3, padding=1),
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
        """The last layer (timm's name for it)."""
        return self[-1]

    def reset_classifier(self, num_classes: int) -> None:
        """Put a fresh last layer for `num_classes` in place (timm's name for it)."""
        self.num_classes = num_classes
        self[-1] = nn.Linear(512, num_classes)


def small_vit(num_classes: int = 10, *, channels: int = 3, input_size: Size = (32, 32)) -> nn.Module:
    """timm's VisionTransformer with patches of 4 pixels: 64 tokens of 256 numbers at 32 pixels, 8 blocks."""
    from timm.models.vision_transformer import VisionTransformer

    options: dict[str, Any] = {"img_size": input_size, "patch_size": 4, "in_chans": channels}
    return VisionTransformer(num_classes=num_classes, embed_dim=256, depth=8, num_heads=4, **options)


@dataclass(frozen=True)
class Network:
    """How to make one: `make(num_classes, channels=…)`, with `input_size=…` too if it is made for one size."""

    make: Callable[..., nn.Module]
    input_size: Size = (32, 32)
    mean: tuple[float, ...] = CIFAR_MEAN
    std: tuple[float, ...] = CIFAR_STD
    sized: bool = False


NETWORKS: Mapping[str, Network] = {
    "small": Network(SmallResNet, (28, 28), FASHION_MEAN, FASHION_STD),
    "resnet18_32": Network(partial(SmallResNet, widths=RESNET18, stride=1)),
    "resnet18_ablated": Network(AblatedResNet, mean=(0.0,) * 3, std=(1.0,) * 3),
    "vit_patch4_32": Network(small_vit, sized=True),
    "cnn_ibp": Network(IntervalNetwork, sized=True),
    **{f"bagnet{field}": Network(partial(BagNet, blocks=small_blocks(field))) for field in (5, 9, 17)},
    **{
        f"bagnet{field}_224": Network(
            partial(BagNet, blocks=large_blocks(field)), (224, 224), IMAGENET_MEAN, IMAGENET_STD
        )
        for field in (17, 33)
    },
}
"""Names that `load_classifier` knows beside timm's."""
