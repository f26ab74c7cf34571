"""Open a data set by its name or folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.resources import files
from itertools import product
from pathlib import Path
from tarfile import TarError

import numpy as np

from patchproof.data._sources import ArraySource, ImageSource, class_folders, open_class_folders
from patchproof.types import InputError, typed

_VALIDATION = ("val", "validation", "valid")
_USUAL_SPLITS = ("train", *_VALIDATION, "test")
_FASHION = "T-shirt/top,Trouser,Pullover,Dress,Coat,Sandal,Shirt,Sneaker,Bag,Ankle boot"


@dataclass(frozen=True)
class _Known:
    """A named set. If it is published as arrays, `published` are their splits, and torchvision reads `file`."""

    classes: int
    folders: tuple[str, ...]
    published: tuple[str, ...] = ()
    file: str = ""


_KNOWN = {
    "imagenet": _Known(
        1000,
        ("imagenet/{split}", "ILSVRC2012/{split}", "ILSVRC2012_img_{split}", "ILSVRC/Data/CLS-LOC/{split}", "{split}"),
    ),
    "imagenette": _Known(
        10, ("imagenette2/{split}", "imagenette2-320/{split}", "imagenette2-160/{split}", "imagenette/{split}")
    ),
    "cifar10": _Known(10, ("cifar10/{split}",), ("train", "test"), "cifar-10-batches-py"),
    "cifar100": _Known(100, ("cifar100/{split}",), ("train", "test"), "cifar-100-python"),
    "svhn": _Known(10, ("svhn/{split}",), ("train", "test", "extra"), "{split}_32x32.mat"),
    "fashion-mini": _Known(10, (), ("train", "test")),
}

DATASETS = tuple(_KNOWN)
"""The names that `open_dataset` knows; anything else must be a folder of class folders."""


class NoSplitError(InputError):
    """A data set is there, but not the split that was asked for."""


@typed
def open_dataset(
    dataset: str | Path, *, data_dir: Path | str | None = None, split: str | None = None, download: bool = False
) -> ImageSource:
    """Open the images of a named set under `data_dir`, or of a folder of class folders.

    The default `split` is the set's evaluation split; for a folder that is `test`, or `val` if there is no `test`. The
    split "val" may be called "validation" or "valid"; "val" and "test" stand for each other if only one exists. A
    folder may hold the class folders itself (its split is then "all") or one folder of them per split.
    """
    if str(dataset) in _KNOWN:
        return _open_named(str(dataset), Path(data_dir or "data").expanduser(), split, download=download)
    folder = Path(dataset).expanduser()
    if folder.is_file():
        raise InputError(
            f"{str(dataset)!r} is a file, not a folder of class folders; `patchproof predict` takes images"
        )
    if not folder.is_dir():
        known = {path.name.lower(): str(path) for path in folder.parent.glob("*/")} | {name: name for name in DATASETS}
        near = get_close_matches(folder.name.lower(), known, n=1)
        hint = f"; did you mean {known[near[0]]!r}?" if near else ""
        named = ", ".join(DATASETS)
        raise InputError(f"unknown dataset {str(dataset)!r}: no folder of class folders, and none of {named}{hint}")
    name = folder.resolve().name
    for candidate in _with_alias(split or "test"):
        if class_folders(folder / candidate):
            return open_class_folders(folder / candidate, name=name, split=candidate)
    existing = [s for s in _USUAL_SPLITS if class_folders(folder / s)]
    if existing:
        raise _no_split(repr(str(folder)), split or "test", existing)
    classes = class_folders(folder)
    if split is not None and classes:
        raise InputError(f"{str(folder)!r} has no split {split!r}: it holds class folders itself; leave the split out")
    for inside in classes:  # otherwise each data set in `folder` would become one class
        if any(class_folders(folder / inside / split) for split in _USUAL_SPLITS):
            raise InputError(f"{str(folder)!r} holds data sets, not classes; choose one, e.g. {folder / inside}")
    return open_class_folders(folder, name=name, split="all")


def _open_named(name: str, data_dir: Path, split: str | None, *, download: bool) -> ImageSource:
    """Open the published arrays if they exist, else class folders; else download the set."""
    known = _KNOWN[name]
    split = split or ("test" if known.published else "val")
    places = [known.file.format(split=s) for s in known.published]
    for root in (data_dir, data_dir / name):
        if name == "fashion-mini" or any((root / place).exists() for place in places):
            return _open_published(name, root, split, download=download)
    for template, candidate in product(known.folders, _with_alias(split)):
        root = data_dir / template.format(split=candidate)
        if root.is_dir():
            found = open_class_folders(root, name=name, split=candidate, low_resolution=bool(known.published))
            # A label is a class folder's position, so with a folder missing every later label would be wrong.
            if len(found.class_names) != known.classes:
                raise InputError(
                    f"{name} has {known.classes} classes, but {str(root)!r} has {len(found.class_names)} class "
                    "folders; complete it, or give that folder itself as the dataset to use it as a set of its own"
                )
            return found
    existing = [s for s in _USUAL_SPLITS if any((data_dir / t.format(split=s)).is_dir() for t in known.folders)]
    if existing:
        raise _no_split(f"{name} in {str(data_dir)!r}", split, existing)
    if not download or name == "imagenet":
        published = [known.file.format(split=split)] if known.published else []
        looked = ", ".join([*published, *(template.format(split=split) for template in known.folders)])
        fetch = "download it by hand from https://image-net.org" if name == "imagenet" else "pass download=True"
        raise InputError(
            f"no {name} images in {str(data_dir)!r}: looked there for {looked}; name the folder that holds them as "
            f"data_dir, or {fetch}"
        )
    if known.published:
        return _open_published(name, data_dir, split, download=True)
    from torchvision import datasets

    with _torchvision(name, data_dir, download=True):
        datasets.Imagenette(data_dir, split="val", size="full", download=True)
    return _open_named(name, data_dir, split, download=False)


def _open_published(name: str, root: Path, split: str, *, download: bool) -> ArraySource:
    """Open the embedded Fashion-MNIST; or CIFAR or SVHN with torchvision, which checks md5 sums before unpickling."""
    known = _KNOWN[name]
    found = next((s for s in _with_alias(split) if s in known.published), None)
    if found is None:
        raise _no_split(name, split, known.published)
    if name == "fashion-mini":
        with files("patchproof").joinpath("embedded", "fashion_mini.npz").open("rb") as file:
            arrays = np.load(file, allow_pickle=False)
            labels, pixels = arrays[f"{found}_labels"], arrays[f"{found}_images"]
        return ArraySource(name, found, tuple(_FASHION.split(",")), tuple(labels.tolist()), pixels)
    from torchvision import datasets

    with _torchvision(name, root / known.file.format(split=found), download=download):
        if name == "svhn":
            svhn = datasets.SVHN(root, split=found, download=download)
            pixels = svhn.data.transpose(0, 2, 3, 1)
            return ArraySource(name, found, tuple("0123456789"), tuple(svhn.labels.tolist()), pixels)
        kind = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}[name]
        cifar = kind(root, train=found == "train", download=download)
        return ArraySource(name, found, tuple(cifar.classes), tuple(cifar.targets), cifar.data)


def _with_alias(split: str) -> tuple[str, ...]:
    """The names that a split may have, in the order in which they are looked for."""
    if split == "test":
        return "test", *_VALIDATION
    return tuple(dict.fromkeys((split, *_VALIDATION, "test"))) if split in _VALIDATION else (split,)


def _no_split(where: str, split: str, existing: Sequence[str]) -> NoSplitError:
    return NoSplitError(f"{where} has no split {split!r}; choose one of: {', '.join(existing)}")


@contextmanager
def _torchvision(name: str, place: Path, *, download: bool) -> Iterator[None]:
    """Turn whatever fails while torchvision reads or downloads a set into an InputError with the way out."""
    try:
        yield
    except (OSError, RuntimeError, EOFError, TarError) as error:
        if download:
            failed = f"could not be downloaded ({' '.join(str(error).split())})"
            mend = "check the network, or put the files there by hand"
        else:
            failed = "is incomplete or damaged, its md5 sums are wrong"
            mend = "pass download=True to fetch it again"
        raise InputError(f"{name} in {str(place)!r} {failed}; {mend}") from error
