"""Sets of labelled images: class folders, arrays in memory, or any sequence of (image, label)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from mimetypes import guess_type
from operator import index as as_integer
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float32, UInt8
from PIL import Image
from torch import Tensor

from patchproof.data._decode import BadImageError, decode, header_size, is_unreadable, reading, to_rgb
from patchproof.types import CheckError, InputError, PatchproofError, Size, failure, kind_of, note

EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")

SAMPLED_SIZES = 16
"""At most so many images, spread evenly over a data set, decide by their sizes how all of its images are resized."""

EXPECTED = (
    "expected a sequence of (image, label), PIL images or float tensors (c h w), e.g. [(Image.open('cat.png'), 0)]"
)


@runtime_checkable
class ImageSource(Protocol):
    """Labelled images in a fixed order; `labels[i]` is an index into `class_names`.

    Images of `low_resolution` sets are enlarged uncropped; others are resized and cropped (paper, Section 4.1).
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
        """A posix path inside the set, equal on every machine; bytes that are not text are surrogates."""

    def load(self, index: int) -> Image.Image | Tensor:
        """Return the image in RGB, or as floats (c h w) in [0, 1] to be used unchanged; or raise a BadImageError."""

    def native_sizes(self) -> Mapping[Size, str]:
        """The distinct (height, width) of the images, each with the path of one."""

    def listing_sha256(self, indices: Sequence[int] | None = None) -> str:
        """A digest of the paths, labels, and pixels (of files, the sizes); sequences only read those at `indices`."""


@dataclass(frozen=True)
class FolderSource:
    """Image files: `root/<paths[i]>` has the label `labels[i]`."""

    root: Path
    name: str
    split: str
    class_names: tuple[str, ...] = field(repr=False)
    labels: tuple[int, ...] = field(repr=False)
    paths: tuple[str, ...] = field(repr=False)
    low_resolution: bool

    def __len__(self) -> int:
        return len(self.paths)

    def path(self, index: int) -> str:
        return self.paths[index]

    def load(self, index: int) -> Image.Image:
        return decode(self.root / self.paths[index])

    def native_sizes(self) -> Mapping[Size, str]:
        """The sizes in the headers; a file without a readable header is left out, since `load` reports it."""
        sizes = {header_size(self.root / path): path for path in reversed(self.paths)}
        return {size: path for size, path in sizes.items() if size is not None}

    def listing_sha256(self, indices: Sequence[int] | None = None) -> str:
        digest = sha256()
        for path, label in zip(self.paths, self.labels, strict=True):
            size = None
            with suppress(OSError):
                size = (self.root / path).stat().st_size
            digest.update(_line(path, label) + f"{size}\n".encode())
        return digest.hexdigest()


def open_class_folders(root: Path, *, name: str, split: str, low_resolution: bool | None = None) -> FolderSource:
    """`<root>/<class>/**/<image>`, sorted by class, then by path, both by their bytes.

    Hidden files and folders are ignored (macOS and notebooks leave copies in them), and so are files in `root` itself.
    Unless `low_resolution` is given, the sizes of some images all over the data set decide.
    """
    class_names = class_folders(root)
    if not class_names:
        loose = any(entry.name.lower().endswith(EXTENSIONS) for entry in _visible(root))
        hint = "; `patchproof predict` takes images that are in no class" if loose else ""
        raise InputError(f"no class folders in {str(root)!r}: expected one sub-folder per class, e.g. cat/1.jpg{hint}")
    paths: list[str] = []
    labels: list[int] = []
    others: list[str] = []
    for label, class_name in enumerate(class_names):
        files = sorted(files_below(root, class_name), key=path_bytes)
        found = [file for file in files if file.lower().endswith(EXTENSIONS)]
        others += [file for file in files if not file.lower().endswith(EXTENSIONS)]
        if not found:
            raise InputError(
                f"class folder {str(root / class_name)!r} holds no images ({' '.join(EXTENSIONS)}); "
                "add some or remove the folder"
            )
        paths += found
        labels += [label] * len(found)
    note_unread(others, name)
    if low_resolution is None:
        low_resolution = _low_resolution(lambda i: header_size(root / paths[i]), len(paths), name)
    return FolderSource(root, name, split, class_names, tuple(labels), tuple(paths), low_resolution)


def _low_resolution(size_of: Callable[[int], Size | None], count: int, name: str) -> bool:
    """True if most images of a sample are below 64 pixels on both sides; one setting holds for the whole data set."""
    sizes = map(size_of, range(0, count, -(-count // SAMPLED_SIZES)))
    small = [max(size) < 64 for size in sizes if size is not None]
    low_resolution = 2 * sum(small) > len(small)
    if len(set(small)) > 1:
        how = "enlarged whole, without keeping their aspect ratio" if low_resolution else "resized and cropped"
        note(f"{name} has images below 64 pixels and larger ones; all are {how}, as suits most of them")
    return low_resolution


def class_folders(root: Path) -> tuple[str, ...]:
    """The names of the visible sub-folders, without links that lead back to `root` or to a folder above it."""
    if not root.is_dir():
        return ()
    above = _with_parents(root)
    folders = (Path(entry.path) for entry in _visible(root))
    return tuple(folder.name for folder in folders if folder.is_dir() and Path(os.path.realpath(folder)) not in above)


def note_unread(others: Iterable[str], name: str) -> None:
    """Say how many of the `others`, which are left out, are images by their names, such as a phone's HEIC."""
    images = [file for file in others if (guess_type(file, strict=False)[0] or "").startswith("image/")]
    if images:
        note(f"{name}: images of unknown formats are left out ({len(images)}); convert them", example=images[0])


def files_below(root: Path, folder: str = "") -> Iterator[str]:
    """The visible files below `root`, or below a folder in it, as paths from `root`.

    Links are followed; each real folder is read once, so that loops of links end.
    """
    seen, pending = _with_parents(root), [folder]
    if not folder:
        seen.remove(Path(os.path.realpath(root)))
    while pending:
        inside = pending.pop()
        real = Path(os.path.realpath(root / inside))
        if real in seen:
            continue
        seen.add(real)
        for entry in _visible(root / inside):
            path = Path(entry.path)  # a DirEntry raises an error on a loop of links, a Path does not
            name = f"{inside}/{entry.name}" if inside else entry.name
            if path.is_dir():
                pending.append(name)
            # A link to nothing is listed, and is a bad image later; pipes and devices are not read.
            elif path.is_file() or not path.exists():
                yield name


def _with_parents(folder: Path) -> set[Path]:
    real = Path(os.path.realpath(folder))
    return {real, *real.parents}


def _visible(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted((e for e in entries if not e.name.startswith(".")), key=lambda e: path_bytes(e.name))
    except OSError as error:
        raise InputError(f"cannot list the folder {str(folder)!r}: {error.strerror}") from error


@dataclass(frozen=True, eq=False)
class ArraySource:
    """Images in memory: `pixels[i]`, grey (h w) or RGB (h w 3), has the label `labels[i]`."""

    name: str
    split: str
    class_names: tuple[str, ...] = field(repr=False)
    labels: tuple[int, ...] = field(repr=False)
    pixels: UInt8[np.ndarray, "n h w *rgb"] = field(repr=False)
    low_resolution: bool = True

    def __len__(self) -> int:
        return len(self.pixels)

    def path(self, index: int) -> str:
        return f"{self.split}/{index:05d}"

    def load(self, index: int) -> Image.Image:
        return Image.fromarray(self.pixels[index]).convert("RGB")

    def native_sizes(self) -> Mapping[Size, str]:
        return {(self.pixels.shape[1], self.pixels.shape[2]): self.path(0)}

    def listing_sha256(self, indices: Sequence[int] | None = None) -> str:
        digest = sha256(f"{self.pixels.shape[1:]}\n".encode())
        for index, label in enumerate(self.labels):
            digest.update(_line(self.path(index), label) + self.pixels[index].tobytes())
        return digest.hexdigest()


class SequenceSource:
    """Any sequence of (image, label): PIL images, or float tensors (c h w) in [0, 1] of the network's input size.

    `load` reads an item once and remembers its label. `labels[i]` reads the item only if it was not loaded before, and
    is −1 if it cannot be read. Items are read from several threads.
    """

    name, split = "images", "all"
    class_names: tuple[str, ...] = ()

    def __init__(self, items: Any) -> None:
        if not len(items):
            raise InputError(f"there are no images; {EXPECTED}")
        self.items = items
        self.labels: Sequence[int] = _Labels(self)
        self.known_labels: dict[int, int] = {}
        with suppress(BadImageError):
            self.load(0)

    def __len__(self) -> int:
        return len(self.items)

    @cached_property
    def low_resolution(self) -> bool:
        return _low_resolution(self._size, len(self), self.name)

    def path(self, index: int) -> str:
        return f"{index:05d}"

    def load(self, index: int) -> Image.Image | Float32[Tensor, "c h w"]:
        try:
            item = self.items[index]
        except (PatchproofError, MemoryError):
            raise
        except Exception as error:
            if not is_unreadable(error):
                raise CheckError(
                    f"the data set fails at item {index}: {failure(error)}; for an image that cannot be read, raise an "
                    "OSError"
                ) from error
            with reading(self.path(index)):
                raise
        parts = item if isinstance(item, (tuple, list)) else (item,)
        if len(parts) != 2 or not isinstance(parts[0], (Image.Image, Tensor)):
            raise InputError(f"item {index} is ({'; '.join(map(kind_of, parts[:3]))}); {EXPECTED}")
        image, label = parts
        try:
            self.known_labels[index] = as_integer(label)
        except TypeError:
            raise InputError(f"the label of item {index} must be an integer, not {label!r:.60}") from None
        with reading(self.path(index)):
            return to_rgb(image) if isinstance(image, Image.Image) else unit_floats(image)

    def native_sizes(self) -> Mapping[Size, str]:
        sizes = {self._size(index): self.path(index) for index in reversed(range(len(self)))}
        return {size: path for size, path in sizes.items() if size is not None}

    def listing_sha256(self, indices: Sequence[int] | None = None) -> str:
        digest = sha256()
        for index in range(len(self)) if indices is None else indices:
            try:
                pixels = np.asarray(self.load(index))
            except BadImageError as error:
                pixels = np.frombuffer(error.reason.encode(), np.uint8)
            digest.update(_line(self.path(index), self.labels[index]) + f"{pixels.shape}\n".encode() + pixels.tobytes())
        return digest.hexdigest()

    def _size(self, index: int) -> Size | None:
        try:
            image = self.load(index)
        except BadImageError:
            return None
        return (image.shape[1], image.shape[2]) if isinstance(image, Tensor) else (image.height, image.width)


class _Labels(Sequence[int]):
    """The labels of a SequenceSource, read when they are asked for."""

    def __init__(self, source: SequenceSource) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        index = range(len(self))[index]
        if index not in self.source.known_labels:
            with suppress(BadImageError):
                self.source.load(index)
        return self.source.known_labels.get(index, -1)


def as_source(data: Any) -> ImageSource:
    """The data itself if it is an image source, else a source of any sequence of (image, label)."""
    if isinstance(data, ImageSource):
        return data
    if isinstance(data, (str, bytes, Mapping)) or not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        inside = "; give loader.dataset" if hasattr(data, "dataset") else ""
        raise InputError(f"{type(data).__name__} is no data set: {EXPECTED}, or what open_dataset(…) returns{inside}")
    return SequenceSource(data)


def path_bytes(path: str) -> bytes:
    """The bytes of a path in the file system, for sorting and hashing: they do not depend on the locale."""
    return path.encode("utf-8", "surrogateescape")


def _line(path: str, label: int) -> bytes:
    return path_bytes(path) + f"\0{label}\0".encode()  # no path holds a zero byte


def unit_floats(image: Tensor) -> Float32[Tensor, "c h w"]:
    """Return the image in float32 on the CPU; raise ValueError if it is no image in [0, 1]."""
    if not image.is_floating_point() or image.ndim != 3 or not image.numel():
        mend = "" if image.is_floating_point() else "; divide bytes by 255"
        if image.ndim == 4 and len(image) == 1:
            mend += "; drop the first dimension: image[0]"
        raise ValueError(f"{kind_of(image)}, expected floats in [0, 1] (channels, height, width){mend}")
    low, high = torch.stack(image.aminmax()).tolist()
    if not (low >= 0 and high <= 1):  # NaN fails both
        mend = "; leave normalisation to the classifier" if low < 0 else "; divide bytes by 255" if high > 1 else ""
        raise ValueError(f"values from {low:g} to {high:g}, expected 0 to 1{mend}")
    return image.detach().to("cpu", torch.float32)
