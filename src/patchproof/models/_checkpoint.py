"""Checkpoint folders: `model.safetensors` and `classifier.json`, whole or not there, even after a kill."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

from patchproof.models._classifier import ImageClassifier, settings
from patchproof.models._own import is_own
from patchproof.models._state import MOST_CLASSES, State, first_line, read_state, write_state
from patchproof.models._timm import RESERVED_ARGS
from patchproof.seals import is_whole, sealed
from patchproof.types import InputError, Interpolation

SCHEMA = 1
WEIGHTS, RECORD = "model.safetensors", "classifier.json"


def save_checkpoint(
    classifier: ImageClassifier,
    folder: Path,
    *,
    extra: Mapping[str, Any] | None = None,
    write_more: Callable[[Path], None] | None = None,
) -> None:
    """Write the classifier into `folder`, in place of the checkpoint that may be there.

    `write_more(path)` may put further files into it before it takes its place.

    The folder is replaced as a whole, other files in it included. It is written beside and renamed, so a failure or
    a kill at any moment leaves the old checkpoint or the new one: readers here know where the old one waits meanwhile.
    """
    folder = Path(folder).resolve()
    record = _plain_record(classifier, extra)
    _require_replaceable(folder)
    fresh = _beside(folder, "writing")
    shutil.rmtree(fresh, ignore_errors=True)
    try:
        _write(fresh, record, classifier)
        if write_more is not None:
            write_more(fresh)
        for path in (*fresh.iterdir(), fresh):
            _to_disk(path)
        _swap(fresh, folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def checkpoint_architecture(folder: Path) -> str | None:
    """What the checkpoint in `folder` is of; None if the folder holds no checkpoint.

    Never a factory: building one runs code, which only the user may name, not a folder that anybody may have written.
    """
    place = settled(Path(folder).expanduser())
    if not (place / RECORD).is_file():
        return None
    name = str(read_record(place)["architecture"])
    if is_own(name):
        raise InputError(f"{folder} holds weights for the factory {name}; name that as the model to have its code run")
    return name


def checkpoint_extra(folder: Path) -> dict[str, Any]:
    """What `save_checkpoint` was given as `extra`."""
    return dict(read_record(settled(Path(folder)))["extra"])


def settled(folder: Path) -> Path:
    """Where the checkpoint `folder` is: itself, or beside it where a kill came between the two renames of a save."""
    previous = _beside(Path(os.path.realpath(folder)), "previous")  # Path.resolve fails on links that form a loop
    return previous if previous.is_dir() and not folder.exists() else folder


def read_record(folder: Path) -> dict[str, Any]:
    """The checked contents of `classifier.json`: anybody may have written it."""
    path = folder / RECORD
    for name in (RECORD, WEIGHTS):
        if not (folder / name).is_file():
            raise InputError(
                f"{folder} is no checkpoint: {name} is missing; give a folder that `patchproof train` wrote"
            )
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise InputError(f"{path} is damaged ({first_line(error)}); take another checkpoint") from error
    _check_record(record, path)
    return record


def read_weights(folder: Path) -> State:
    """The tensors of a checkpoint, if the file is the one that was saved; older checkpoints do not say."""
    expected = read_record(folder).get("sha256")
    if expected is not None and expected != file_sha256(folder / WEIGHTS):
        raise InputError(f"{folder / WEIGHTS} is damaged: not the file that was saved; take another checkpoint")
    return read_state(folder / WEIGHTS)


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _plain_record(classifier: ImageClassifier, extra: Mapping[str, Any] | None) -> dict[str, Any]:
    """What classifier.json says, as JSON gives it back."""
    record = {"schema": SCHEMA, **settings(classifier), "extra": dict(extra or {})}
    try:
        return json.loads(json.dumps(record, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise InputError(f"extra must be plain JSON (text, finite numbers, lists, mappings): {error}") from error


def _require_replaceable(folder: Path) -> None:
    """Only nothing, an empty folder or a checkpoint is replaced."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file; give a folder for the checkpoint")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / RECORD).is_file():
        raise InputError(f"{folder} holds other things than a checkpoint and would be replaced; give a new folder")


def _write(fresh: Path, record: Mapping[str, Any], classifier: ImageClassifier) -> None:
    fresh.mkdir(parents=True)
    write_state(classifier.module.state_dict(), fresh / WEIGHTS)
    whole = sealed({**record, "sha256": file_sha256(fresh / WEIGHTS)})
    (fresh / RECORD).write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


def _swap(fresh: Path, folder: Path) -> None:
    """Rename `fresh` to `folder`; in between, the old one is whole under its other name (see `settled`)."""
    previous = _beside(folder, "previous")
    if folder.exists():
        shutil.rmtree(previous, ignore_errors=True)
        folder.rename(previous)
    try:
        fresh.rename(folder)
    except OSError:
        if previous.exists():
            previous.rename(folder)
        raise
    _to_disk(folder.parent)
    shutil.rmtree(previous, ignore_errors=True)


def _beside(folder: Path, word: str) -> Path:
    return folder.parent / f".{folder.name}.{word}"


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _list_of(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_model_args(value: Any) -> bool:
    return isinstance(value, dict) and not set(value) & set(RESERVED_ARGS)


_FIELDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "architecture": ("text", lambda value: _is_text(value) and bool(value)),
    "source": ("text", _is_text),
    "mean": ("a list of numbers", _list_of(_is_number)),
    "std": ("a list of numbers", _list_of(_is_number)),
    "input_size": ("two whole numbers", lambda value: _list_of(_is_count)(value) and len(value) == 2),
    "num_classes": (f"a whole number up to {MOST_CLASSES}", lambda value: _is_count(value) and value <= MOST_CLASSES),
    "class_names": ("a list of texts, or null", lambda value: value is None or _list_of(_is_text)(value)),
    "interpolation": ("one of " + ", ".join(get_args(Interpolation)), lambda value: value in get_args(Interpolation)),
    "crop_pct": ("a number", _is_number),
    "model_args": ("a mapping without " + ", ".join(RESERVED_ARGS), _is_model_args),
    "extra": ("a mapping", lambda value: isinstance(value, dict)),
}


def _check_record(record: Any, path: Path) -> None:
    if not isinstance(record, dict) or not _is_count(record.get("schema")):
        raise InputError(f"{path} is no description of a classifier: expected a mapping with a whole number `schema`")
    if record["schema"] != SCHEMA:
        raise InputError(f"{path} has schema {record['schema']}, this version reads {SCHEMA}; update patchproof")
    for name, expected, value in _misfits(record):
        raise InputError(f"{path} is damaged: {name} should be {expected}, got {value!r:.60}; take another checkpoint")
    if not is_whole(record):
        raise InputError(
            f"{path} is damaged: not what was saved; take another checkpoint, or remove its `seal` if you changed it"
        )


def _misfits(record: Mapping[str, Any]) -> Iterable[tuple[str, str, Any]]:
    for name, (expected, is_right) in _FIELDS.items():
        if name not in record or not is_right(record[name]):
            yield name, expected, record.get(name)
