"""Decode any image file to 8-bit RGB, or raise a BadImageError that names it."""

from __future__ import annotations

import io
import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from traceback import walk_tb

import numpy as np
from jaxtyping import UInt8
from PIL import ExifTags, Image, UnidentifiedImageError

from patchproof.types import CheckError, Size, note

File = str | os.PathLike[str] | io.BytesIO | io.BufferedReader

MAX_PIXELS = 178_000_000
"""Images with more pixels are refused without decoding; just below the limit at which Pillow itself refuses them."""

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
"""Formats that are decoded, whatever a file's name says. Pillow knows more, but its EPS reader starts programs."""

_FAILURES = (OSError, SyntaxError, ValueError, TypeError, LookupError, ArithmeticError, EOFError, RuntimeError)
"""Pillow's readers raise whatever their parser trips over in a damaged file."""


class BadImageError(CheckError):
    """The image at `path` cannot be used, because of `reason`."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        # repr keeps the message on one printable line: a name may hold line breaks, or bytes that are not text.
        return f"cannot use image {self.path!r}: {self.reason}; repair or remove it, or pass skip_bad=True"


def decode(file: File) -> Image.Image:
    """Return the image's first frame as 8-bit RGB; every failure is a BadImageError.

    Alpha and transparent colours are composited over white; 16-bit grey is scaled by 1/257; CMYK is converted
    without a colour profile. The EXIF orientation is not applied, as in torchvision's and timm's pipelines.
    """
    with _opened(file) as image:
        return to_rgb(image)


def header_size(file: File) -> Size | None:
    """(height, width) from the header alone; None if it cannot be read."""
    try:
        with _opened(file) as image:
            return image.height, image.width
    except BadImageError:
        return None


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Turn every failure of Pillow inside this context into a BadImageError about `path`."""
    try:
        yield
    except BadImageError:
        raise
    except (*_FAILURES, struct.error, zlib.error, Image.DecompressionBombError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, Image.DecompressionBombError):
            reason = f"it has more than the {MAX_PIXELS:,} pixels allowed, so it may be a decompression bomb"
        elif isinstance(error, IsADirectoryError):
            reason = "it is a folder; give the image files in it, e.g. sorted(Path(folder).glob('*.jpg'))"
        elif isinstance(error, OSError) and error.strerror:
            reason = error.strerror
        raise BadImageError(path, reason) from error


def is_unreadable(error: Exception) -> bool:
    """True if the file system or Pillow has raised the error, not the code that uses them."""
    *_, (frame, _) = walk_tb(error.__traceback__)
    by_pillow = Path(frame.f_code.co_filename).is_relative_to(Path(Image.__file__).parent)
    return by_pillow or isinstance(error, (OSError, Image.DecompressionBombError))


@contextmanager
def _opened(file: File) -> Iterator[Image.Image]:
    name = os.fspath(file) if isinstance(file, (str, os.PathLike)) else "<stream>"
    with reading(name):
        try:
            image = Image.open(file, formats=FORMATS)
        except UnidentifiedImageError as error:
            known = f"not an image, or its header is damaged (known formats: {', '.join(FORMATS)})"
            size = Path(name).stat().st_size if isinstance(file, (str, os.PathLike)) else file.seek(0, os.SEEK_END)
            raise BadImageError(name, known if size else "the file is empty") from error
        with image:
            if image.width * image.height > MAX_PIXELS:
                raise Image.DecompressionBombError
            yield image


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert an image of any mode as `decode` does; raise ValueError if its grey levels are out of range."""
    image.load()
    if is_turned(image):
        turned = "some images have an EXIF orientation, which is not applied: they may be seen lying on their side"
        note(turned, example=str(getattr(image, "filename", "")))
    if image.mode == "F" or image.mode.startswith("I"):
        return Image.fromarray(_grey(np.asarray(image), transparent=image.info.get("transparency"))).convert("RGB")
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
    return image.convert("RGB")


def is_turned(image: Image.Image) -> bool:
    """True if viewers turn or mirror the image, as its EXIF orientation says."""
    with suppress(Exception):  # tags may be damaged
        return image.getexif().get(ExifTags.Base.Orientation, 1) != 1
    return False


def _grey(levels: np.ndarray, *, transparent: int | None) -> UInt8[np.ndarray, "h w"]:
    """Scale 16-bit levels by 1/257, where Pillow would make everything above 255 white, and floats in [0, 1] by 255."""
    low, high = levels.min(), levels.max()
    if levels.dtype.kind == "f":
        if not (low >= 0 and high <= 255):  # NaN fails both
            raise ValueError(f"grey levels from {low:g} to {high:g}, expected 0 to 1 or 0 to 255; save it with 8 bits")
        return np.rint(levels * 255 if high <= 1 else levels).astype(np.uint8)
    if low < 0 or high > 65535:
        raise ValueError(f"grey levels from {low} to {high}, expected 0 to 65535; save it with 16 bits")
    grey = ((levels.astype(np.int64) + 128) // 257).astype(np.uint8)
    return grey if transparent is None else np.where(levels == transparent, np.uint8(255), grey)
