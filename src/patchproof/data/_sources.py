"""A set of labelled images, from class folders or from arrays in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from patchproof.data._decode import BadImageError, decode, header_size
from patchproof.types import Size


@runtime_checkable
class ImageSource(Protocol):
    """Labelled images in a fixed order; `labels[i]` is an index into `class_names`.

    `low_resolution` sets (32-pixel ones) are enlarged whole; others are resized and cropped (paper, Section 4.1).
    """

    @property
    def name(self) -> str: ...
    @property
    def split(self) -> str: ...
    @property
    def class_names(self) -> tuple[str, ...]: ...
    @property
    def labels(self) -> Sequence[int]: ...
    @property
    def low_resolution(self) -> bool: ...

    def __len__(self) -> int: ...

    def path(self, index: int) -> str:
        """The same name on every machine: a posix path inside the set. Bytes that are not text are surrogates."""

    def load(self, index: int) -> Image.Image:
        """The image in RGB, or a BadImageError."""

    def native_sizes(self) -> set[Size]:
        """The distinct (height, width) of the images."""

    def listing_sha256(self) -> str:
        """A digest of every path, label and file size (folders) or pixel (arrays)."""


@dataclass(frozen=True)
class FolderSource:
    """`root/<paths[i]>` has the label `labels[i]`."""

    root: Path
    name: str
    split: str
    class_names: tuple[str, ...]
    labels: tuple[int, ...]
    paths: tuple[str, ...]
    low_resolution: bool

    def __len__(self) -> int:
        return len(self.paths)

    def path(self, index: int) -> str:
        return self.paths[index]

    def load(self, index: int) -> Image.Image:
        return decode(self.root / self.paths[index])

    def native_sizes(self) -> set[Size]:
        """From the headers alone; files without a readable one are left out, `load` reports them."""
        sizes = (size_or_none(self.root / path) for path in self.paths)
        return {size for size in sizes if size is not None}

    def listing_sha256(self) -> str:
        digest = sha256()
        for path, label in zip(self.paths, self.labels, strict=True):
            digest.update(_line(path, label) + f"{_file_size(self.root / path)}\n".encode())
        return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class ArraySource:
    """`pixels[i]`, grey (h w) or RGB (h w 3), has the label `labels[i]` and the path `<split>/<i>`."""

    name: str
    split: str
    class_names: tuple[str, ...]
    labels: tuple[int, ...]
    pixels: UInt8[np.ndarray, "n h w *rgb"]
    low_resolution: bool = True

    def __len__(self) -> int:
        return len(self.pixels)

    def path(self, index: int) -> str:
        return f"{self.split}/{index:05d}"

    def load(self, index: int) -> Image.Image:
        return Image.fromarray(self.pixels[index]).convert("RGB")

    def native_sizes(self) -> set[Size]:
        return {(self.pixels.shape[1], self.pixels.shape[2])}

    def listing_sha256(self) -> str:
        digest = sha256(f"{self.pixels.shape[1:]}\n".encode())
        for index, label in enumerate(self.labels):
            digest.update(_line(self.path(index), label) + self.pixels[index].tobytes())
        return digest.hexdigest()


def size_or_none(file: Path) -> Size | None:
    """(height, width), None where the header cannot be read."""
    try:
        return header_size(file)
    except BadImageError:
        return None


def path_bytes(path: str) -> bytes:
    """What to sort by and to hash: the file system's own bytes, the same whatever the locale."""
    return path.encode("utf-8", "surrogateescape")


def _line(path: str, label: int) -> bytes:
    return path_bytes(path) + f"\0{label}\0".encode()  # no path holds a zero byte


def _file_size(file: Path) -> int | None:
    try:
        return file.stat().st_size
    except OSError:
        return None
