"""Augmentations of a training batch, drawn from a generator."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.nn import functional


def flip_and_crop(
    images: Float[Tensor, "b c h w"], generator: torch.Generator
) -> tuple[Float[Tensor, "b c h w"], Bool[Tensor, " b"]]:
    """Mirror each image with probability ½, and enlarge a random crop of 50 to 100% of its area to the full size.

    Also returns which images are mirrored.
    """
    count = len(images)
    side = (0.5 + 0.5 * torch.rand(count, generator=generator)).sqrt()
    shift = (2 * torch.rand(count, 2, generator=generator) - 1) * (1 - side)[:, None]
    mirrored = torch.rand(count, generator=generator) < 0.5
    transform = torch.zeros(count, 2, 3)
    transform[:, 0, 0], transform[:, 1, 1] = side * (1 - 2 * mirrored.float()), side
    transform[:, :, 2] = shift
    grid = functional.affine_grid(transform.to(images), list(images.shape), align_corners=False)
    found = functional.grid_sample(images, grid, mode="bilinear", padding_mode="reflection", align_corners=False)
    return found, mirrored


def flip_and_shift(
    images: Float[Tensor, "b c h w"], generator: torch.Generator
) -> tuple[Float[Tensor, "b c h w"], Bool[Tensor, " b"]]:
    """Mirror each image with probability ½, and shift it by up to an eighth of each side (4 of 32 pixels).

    The border is filled by reflection. Also returns which images are mirrored.
    """
    count, sides = len(images), images.shape[-2:]

    def sources(length: int) -> Int64[Tensor, "b n"]:
        shift = torch.randint(-(length // 8), length // 8 + 1, (count, 1), generator=generator)
        place = (torch.arange(length) + shift).abs()
        return torch.minimum(place, 2 * (length - 1) - place)

    rows, columns = map(sources, sides)
    mirrored = torch.rand(count, generator=generator) < 0.5
    columns = torch.where(mirrored[:, None], sides[1] - 1 - columns, columns).to(images.device)
    every = torch.arange(count, device=images.device)[:, None, None]
    found = images.permute(0, 2, 3, 1)[every, rows.to(images.device)[:, :, None], columns[:, None]]
    return found.permute(0, 3, 1, 2), mirrored
