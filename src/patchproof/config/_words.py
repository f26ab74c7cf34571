"""Sizes, patches and numbers as they are written on the command line."""

from __future__ import annotations

import re

from patchproof.geometry import square_side
from patchproof.types import InputError, Size


def parse_size(text: str, *, what: str) -> Size:
    """`224` or `224x320` (height x width)."""
    match = re.fullmatch(r"(\d{1,6})(?:[x×](\d{1,6}))?", text.strip())
    if not match or 0 in (size := (int(match[1]), int(match[2] or match[1]))):
        raise InputError(f"{what} must look like 224 or 224x320 (height x width), not `{text}`")
    return size


def parse_patches(text: str, image_size: Size, *, flag: str = "--patch") -> tuple[Size, ...]:
    """`3%`, `39px`, `20x60px`, or several of them with commas, in pixels of an image of this size."""
    return tuple(_parse_patch(part, image_size, flag) for part in text.split(","))


def _parse_patch(text: str, image_size: Size, flag: str) -> Size:
    percent = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text.strip())
    if percent:
        side = square_side(float(percent[1]), image_size)
        return side, side
    pixels = re.fullmatch(r"([1-9]\d{0,5})(?:[x×]([1-9]\d{0,5}))?px", text.strip())
    if not pixels:
        raise InputError(f"{flag} must look like 3%, 39px or 20x60px, not `{text}`")
    return int(pixels[1]), int(pixels[2] or pixels[1])


def parse_batch_size(text: str) -> int | None:
    """A positive number, or None for `auto`."""
    if text == "auto":
        return None
    if not re.fullmatch(r"[1-9]\d{0,6}", text):
        raise InputError(f"--batch-size must be a positive number or `auto`, not `{text}`")
    return int(text)
