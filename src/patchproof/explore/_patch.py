"""Patches to put on an image: noise, a picture, or one made to mislead."""

from __future__ import annotations

import time

import numpy as np
import torch
from jaxtyping import Bool, Float, UInt8
from PIL import Image
from torch import Tensor

from patchproof.defenses import PatchCleanser
from patchproof.geometry import Rect
from patchproof.masking import as_images, evaluating, fill_colour, label_margin, occlude, tf32
from patchproof.types import InputError, Size

STEP = 0.1
"""First step of the attack, as a share of the range of a pixel; it shrinks to nothing over the steps."""

COPIES = 9
"""Masked copies that a step against the defence looks at, drawn anew each time where there are more masks."""


def place(pixels: UInt8[Tensor, "c h w"], patch: UInt8[Tensor, "c p q"], *, top: int, left: int) -> Tensor:
    """The image with the patch on it; every pixel outside the patch stays as it is."""
    rect = Rect(top, left, patch.shape[1], patch.shape[2])
    height, width = int(pixels.shape[1]), int(pixels.shape[2])
    if not Rect(0, 0, height, width).contains(rect):
        raise InputError(
            f"a {rect.height}×{rect.width} patch at row {top}, column {left} leaves the {height}×{width} image; choose "
            f"a row of 0 to {height - rect.height} and a column of 0 to {width - rect.width}"
        )
    patched = pixels.clone()
    patched[:, rect.top : rect.bottom, rect.left : rect.right] = patch
    return patched


def noise(size: Size, generator: torch.Generator, *, channels: int = 3) -> UInt8[Tensor, "c p q"]:
    """Every value of every pixel drawn evenly."""
    return torch.randint(256, (channels, *size), generator=generator, dtype=torch.uint8)


def paste(picture: Image.Image, size: Size) -> UInt8[Tensor, "3 p q"]:
    """The whole picture, shrunk or stretched to the patch."""
    shrunk = picture.convert("RGB").resize((size[1], size[0]), Image.Resampling.BICUBIC)
    return torch.from_numpy(np.asarray(shrunk).copy()).permute(2, 0, 1)


def optimise(
    defense: PatchCleanser,
    pixels: UInt8[Tensor, "c h w"],
    rect: Rect,
    label: int,
    *,
    defended: bool,
    steps: int,
    generator: torch.Generator,
    device: torch.device | str = "cpu",
    seconds: float = 60.0,
) -> UInt8[Tensor, "c p q"]:
    """Projected gradient descent on the margin of `label`, over the patch's pixels in [0, 1].

    Against the classifier alone, or against the masked copies of the first round in which the patch is seen (the
    mean of their margins). Starts from noise, ends after `steps` or `seconds`, and returns the best patch met.
    """
    image = as_images(pixels[None], device)
    inside = _inside(rect, defense.masks.image_size).to(device)
    keep = _showing(defense, rect).to(device) if defended else torch.ones_like(inside)[None]
    start = as_images(noise((rect.height, rect.width), generator, channels=len(pixels))[None], device)
    canvas = image.clone()
    canvas[..., rect.top : rect.bottom, rect.left : rect.right] = start
    best, least = canvas, torch.inf
    end = time.monotonic() + seconds
    with evaluating(defense.classifier), tf32(False):
        for step in range(steps + 1):
            drawn = torch.randperm(len(keep), generator=generator)[:COPIES].to(device)
            loss, slope = _slope(defense, torch.where(inside, canvas, image), keep[drawn], label)
            if loss < least:
                best, least = canvas, loss
            if time.monotonic() > end:
                break
            canvas = (canvas - STEP * (1 - step / (steps + 1)) * slope.sign()).clamp(0, 1)
    patch = best[0, :, rect.top : rect.bottom, rect.left : rect.right]
    return patch.mul(255).round().to(torch.uint8).cpu().contiguous()


def _slope(
    defense: PatchCleanser, image: Float[Tensor, "1 c h w"], keep: Bool[Tensor, "k 1 h w"], label: int
) -> tuple[float, Float[Tensor, "1 c h w"]]:
    """The mean margin of `label` over these copies, and its gradient at the image."""
    with torch.enable_grad():
        image = image.detach().requires_grad_()
        copies = occlude(image.expand(len(keep), -1, -1, -1), keep, fill_colour(defense.classifier, image))
        margin = label_margin(defense.classifier(copies).float(), torch.full((len(keep),), label, device=image.device))
        (slope,) = torch.autograd.grad(margin.mean(), image)
    return float(margin.detach().mean()), slope


def _inside(rect: Rect, size: Size) -> Bool[Tensor, "1 h w"]:
    inside = torch.zeros(1, *size, dtype=torch.bool)
    inside[:, rect.top : rect.bottom, rect.left : rect.right] = True
    return inside


def _showing(defense: PatchCleanser, rect: Rect) -> Bool[Tensor, "k 1 h w"]:
    """The masks that leave some of the patch visible; all of them where each hides it."""
    keep = defense.masks.keep()
    shows = (keep & _inside(rect, defense.masks.image_size)).flatten(1).any(dim=1)
    return keep[shows] if bool(shows.any()) else keep
