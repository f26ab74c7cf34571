"""From a data set's name or folder to its images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from tarfile import TarError

from patchproof.data._folders import class_folders, has_class_folders, open_class_folders
from patchproof.data._published import (
    OFFICIAL_SPLITS,
    download_imagenette,
    official_file,
    open_fashion_mini,
    open_official,
)
from patchproof.data._sources import ArraySource, FolderSource, ImageSource
from patchproof.types import InputError

DEFAULT_DATA_DIR = Path("data")
_ALIAS = {"val": "test", "test": "val"}
_USUAL_SPLITS = ("train", "val", "test")
_TORCHVISION_FAILURES = (OSError, RuntimeError, EOFError, TarError)


@dataclass(frozen=True)
class _Known:
    """A named set: its evaluation split, and where its class folders may lie under the data folder."""

    evaluation: str
    classes: int
    folders: tuple[str, ...]
    low_resolution: bool


_KNOWN = {
    "imagenet": _Known(
        "val",
        1000,
        ("imagenet/{split}", "ILSVRC2012/{split}", "ILSVRC2012_img_{split}", "ILSVRC/Data/CLS-LOC/{split}", "{split}"),
        low_resolution=False,
    ),
    "imagenette": _Known(
        "val",
        10,
        ("imagenette2/{split}", "imagenette2-320/{split}", "imagenette2-160/{split}", "imagenette/{split}"),
        low_resolution=False,
    ),
    "cifar10": _Known("test", 10, ("cifar10/{split}",), low_resolution=True),
    "cifar100": _Known("test", 100, ("cifar100/{split}",), low_resolution=True),
    "svhn": _Known("test", 10, ("svhn/{split}",), low_resolution=True),
    "fashion-mini": _Known("test", 10, (), low_resolution=True),
}

DATASETS = tuple(_KNOWN)
"""The names `open_dataset` knows; anything else must be a folder of class folders."""


def open_dataset(
    dataset: str, *, data_dir: Path | None = None, split: str | None = None, download: bool = False
) -> ImageSource:
    """The images of a named set under `data_dir`, or of a folder of class folders.

    Without a `split`, the set's evaluation split; "val" and "test" stand for each other where only one exists. A folder
    may hold the class folders itself (its split is then "all") or one folder of them per split.
    """
    if dataset in _KNOWN:
        return _open_named(dataset, Path(data_dir or DEFAULT_DATA_DIR).expanduser(), split, download=download)
    folder = Path(dataset).expanduser()
    if folder.is_dir():
        return _open_folder(folder, split)
    nearest = get_close_matches(dataset.lower(), DATASETS, n=1, cutoff=0)[0]
    raise InputError(
        f"unknown dataset {dataset!r}: no such folder, and not one of {', '.join(DATASETS)}; "
        f"did you mean {nearest!r}? A folder of class folders is also accepted"
    )


def _open_folder(folder: Path, split: str | None) -> FolderSource:
    name = folder.resolve().name
    for candidate in _with_alias(split or "val"):
        if has_class_folders(folder / candidate):
            return open_class_folders(folder / candidate, name=name, split=candidate)
    existing = [s for s in _USUAL_SPLITS if has_class_folders(folder / s)]
    if existing:
        raise _no_split(repr(str(folder)), split or "val", existing)
    if split is not None and class_folders(folder):
        raise InputError(f"{str(folder)!r} has no split {split!r}: it holds class folders itself; leave the split out")
    _refuse_folder_of_sets(folder)
    return open_class_folders(folder, name=name, split="all")


def _refuse_folder_of_sets(folder: Path) -> None:
    """Taken for a class, each data set in `folder` would become one label."""
    for inside in class_folders(folder):
        if any(has_class_folders(folder / inside / split) for split in _USUAL_SPLITS):
            raise InputError(f"{str(folder)!r} holds whole data sets, not classes; choose one, e.g. {folder / inside}")


def _open_named(name: str, data_dir: Path, split: str | None, *, download: bool) -> ImageSource:
    split = split or _KNOWN[name].evaluation
    if name == "fashion-mini":
        return open_fashion_mini(_official_split(name, split))
    official_root = _official_root(name, data_dir)
    if official_root is not None:
        return _open_arrays(name, official_root, split, download=download)
    found: ImageSource | None = _find_folders(name, data_dir, split)
    if found is None and download:
        found = _download(name, data_dir, split)
    if found is None:
        raise _missing(name, data_dir, split)
    return found


def _official_root(name: str, data_dir: Path) -> Path | None:
    """The folder with CIFAR's or SVHN's published files."""
    files = [official_file(name, split) for split in OFFICIAL_SPLITS.get(name, ())]
    roots = (data_dir, data_dir / name)
    return next((root for root in roots if any((root / file).exists() for file in files)), None)


def _open_arrays(name: str, root: Path, split: str, *, download: bool) -> ArraySource:
    split = _official_split(name, split)
    try:
        return open_official(name, root, split, download=download)
    except _TORCHVISION_FAILURES as error:
        if download:
            raise _download_failed(name, root, error) from error
        raise InputError(
            f"{name} in {str(root)!r}: {official_file(name, split)} is incomplete or damaged, its md5 sums are wrong; "
            "pass --download to fetch it again"
        ) from error


def _find_folders(name: str, data_dir: Path, split: str) -> FolderSource | None:
    known = _KNOWN[name]
    for template in known.folders:
        for candidate in _with_alias(split):
            root = data_dir / template.format(split=candidate)
            if root.is_dir():
                source = open_class_folders(root, name=name, split=candidate, low_resolution=known.low_resolution)
                return _with_all_classes(source, known.classes)
    existing = [s for s in _USUAL_SPLITS if any((data_dir / t.format(split=s)).is_dir() for t in known.folders)]
    if existing:
        raise _no_split(f"{name} in {str(data_dir)!r}", split, existing)
    return None


def _with_all_classes(source: FolderSource, expected: int) -> FolderSource:
    """A label is a class folder's position, so with a folder missing every later label would be wrong."""
    if len(source.class_names) != expected:
        raise InputError(
            f"{source.name} has {expected} classes, but {str(source.root)!r} has {len(source.class_names)} class "
            "folders; complete it, or give that folder itself as the dataset to use it as a set of its own"
        )
    return source


def _download(name: str, data_dir: Path, split: str) -> ImageSource | None:
    if name == "imagenet":
        raise InputError(
            "imagenet must be downloaded by hand, after registration at https://image-net.org; "
            f"unpack it to {str(data_dir / 'imagenet' / split)!r}/<wnid>/*.JPEG or point --data-dir at it"
        )
    if name in OFFICIAL_SPLITS:
        return _open_arrays(name, data_dir, split, download=True)
    try:
        download_imagenette(data_dir)
    except _TORCHVISION_FAILURES as error:
        raise _download_failed(name, data_dir, error) from error
    return _find_folders(name, data_dir, split)


def _with_alias(split: str) -> tuple[str, ...]:
    return (split, _ALIAS[split]) if split in _ALIAS else (split,)


def _official_split(name: str, split: str) -> str:
    existing = OFFICIAL_SPLITS[name]
    for candidate in _with_alias(split):
        if candidate in existing:
            return candidate
    raise _no_split(name, split, existing)


def _no_split(where: str, split: str, existing: Sequence[str]) -> InputError:
    return InputError(f"{where} has no split {split!r}; choose one of: {', '.join(existing)}")


def _download_failed(name: str, root: Path, error: Exception) -> InputError:
    reason = " ".join(str(error).split())
    return InputError(
        f"could not download {name} into {str(root)!r}: {reason}; check the network, or put the files there by hand"
    )


def _missing(name: str, data_dir: Path, split: str) -> InputError:
    official = [official_file(name, split)] if name in OFFICIAL_SPLITS else []
    places = [*official, *(template.format(split=split) for template in _KNOWN[name].folders)]
    fetch = "download it by hand from https://image-net.org" if name == "imagenet" else "pass --download to fetch it"
    return InputError(
        f"no {name} images in {str(data_dir)!r}: looked there for {', '.join(places)}; "
        f"name the folder that holds them with --data-dir, or {fetch}"
    )
