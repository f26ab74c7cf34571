"""Class folders: each sub-folder is a class, and every image anywhere inside it belongs to that class."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from patchproof.data._decode import header_size
from patchproof.data._sources import LOW_RESOLUTION_BELOW, FolderSource, path_bytes
from patchproof.types import InputError

EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")

_FolderId = tuple[int, int]


def open_class_folders(root: Path, *, name: str, split: str, low_resolution: bool | None = None) -> FolderSource:
    """`<root>/<class>/**/<image>`, sorted by class, then by path, both by their bytes.

    Hidden files and folders are ignored (macOS and notebooks leave copies in them), as are files in `root` itself.
    """
    class_names = class_folders(root)
    if not class_names:
        raise InputError(f"no class folders in {str(root)!r}: expected one sub-folder per class, e.g. cat/1.jpg")
    inside = [sorted(_images(root, class_name), key=path_bytes) for class_name in class_names]
    for class_name, images in zip(class_names, inside, strict=True):
        if not images:
            raise InputError(
                f"class folder {str(root / class_name)!r} holds no images ({' '.join(EXTENSIONS)}); "
                "add some or remove the folder"
            )
    paths = tuple(path for images in inside for path in images)
    labels = tuple(label for label, images in enumerate(inside) for _ in images)
    if low_resolution is None:
        sizes = (header_size(root / path) for path in paths)
        first = next((size for size in sizes if size is not None), None)
        low_resolution = first is not None and max(first) < LOW_RESOLUTION_BELOW
    return FolderSource(root, name, split, class_names, labels, paths, low_resolution)


def class_folders(root: Path) -> tuple[str, ...]:
    """The names of the visible sub-folders; links back to `root` or to a folder above it are none of them."""
    above = _ids_from_root_up(root)
    return tuple(e.name for e in _visible(root) if _is_folder(e) and _folder_id(Path(e.path)) not in above)


def has_class_folders(folder: Path) -> bool:
    return folder.is_dir() and bool(class_folders(folder))


def _images(root: Path, class_name: str) -> Iterator[str]:
    """Each real folder once, so that links that form a loop end, and none that leads out of the class upwards."""
    seen = _ids_from_root_up(root)
    pending = [class_name]
    while pending:
        inside = pending.pop()
        identity = _folder_id(root / inside)
        if identity in seen:
            continue
        seen.add(identity)
        for entry in _visible(root / inside):
            if _is_folder(entry):
                pending.append(f"{inside}/{entry.name}")
            elif entry.name.lower().endswith(EXTENSIONS) and _is_file(entry):
                yield f"{inside}/{entry.name}"


def _visible(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted((e for e in entries if not e.name.startswith(".")), key=lambda e: path_bytes(e.name))
    except OSError as error:
        raise InputError(f"cannot list the folder {str(folder)!r}: {error.strerror}") from error


def _is_folder(entry: os.DirEntry[str]) -> bool:
    return Path(entry.path).is_dir() if entry.is_symlink() else entry.is_dir()


def _is_file(entry: os.DirEntry[str]) -> bool:
    """A file, or a link to nothing, which is reported as a bad image later. Pipes and devices are not read."""
    if not entry.is_symlink():
        return entry.is_file()
    return Path(entry.path).is_file() or not Path(entry.path).exists()


def _folder_id(folder: Path) -> _FolderId:
    status = folder.stat()
    return status.st_dev, status.st_ino


def _ids_from_root_up(root: Path) -> set[_FolderId]:
    real = root.resolve()
    return {_folder_id(folder) for folder in (real, *real.parents)}
