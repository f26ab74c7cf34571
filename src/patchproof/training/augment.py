"""Light augmentation, batched and on the device: horizontal flips and random resized crops."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

SMALLEST_AREA = 0.5
"""A crop keeps at least this share of the image."""


def flip_and_crop(images: Float[Tensor, "b c h w"], generator: torch.Generator) -> Float[Tensor, "b c h w"]:
    """Each image mirrored with probability ½ and cut to a random part of 50 to 100% of its area, enlarged again."""
    count = len(images)
    side = (SMALLEST_AREA + (1 - SMALLEST_AREA) * torch.rand(count, generator=generator)).sqrt()
    shift = (2 * torch.rand(count, 2, generator=generator) - 1) * (1 - side)[:, None]
    mirrored = 1 - 2 * (torch.rand(count, generator=generator) < 0.5).float()
    transform = torch.zeros(count, 2, 3)
    transform[:, 0, 0], transform[:, 1, 1] = side * mirrored, side
    transform[:, :, 2] = shift
    grid = functional.affine_grid(transform.to(images), list(images.shape), align_corners=False)
    return functional.grid_sample(images, grid, mode="bilinear", padding_mode="reflection", align_corners=False)
