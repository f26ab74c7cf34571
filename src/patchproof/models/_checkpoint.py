"""Checkpoint folders, `model.safetensors` and `classifier.json`, intact or absent even after a kill; and
self-checksums for JSON files."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

import torch

from patchproof.models._build import RESERVED_ARGS, is_own
from patchproof.models._classifier import ImageClassifier, settings, state_sha256
from patchproof.models._state import MOST_CLASSES, State, first_line, read_state, write_state
from patchproof.types import InputError, Interpolation

SCHEMA = 1
WEIGHTS, RECORD = "model.safetensors", "classifier.json"
SEAL = "seal"


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """The content, and its SHA-256 under the last key."""
    plain = {key: value for key, value in content.items() if key != SEAL}
    return {**content, SEAL: hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()}


def is_whole(content: Mapping[str, Any]) -> bool:
    """Whether the content is what was sealed. True where there is no checksum: older files have none."""
    return SEAL not in content or content[SEAL] == sealed(content)[SEAL]


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def save_checkpoint(
    classifier: ImageClassifier,
    folder: Path,
    *,
    extra: Mapping[str, Any] | None = None,
    write_more: Callable[[Path], None] | None = None,
) -> None:
    """Write the classifier into `folder`, in place of the checkpoint that may be there.

    `write_more(path)` may put further files into it before it takes its place. The entire folder is replaced. It is
    written beside and renamed, so a failure or a kill at any moment leaves the old checkpoint or the new one, which
    `settled` finds.
    """
    folder = Path(folder).resolve()
    record: dict[str, Any] = {"schema": SCHEMA, **settings(classifier), "extra": dict(extra or {})}
    try:
        record = json.loads(json.dumps(record, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise InputError(f"extra must be plain JSON (text, finite numbers, lists, mappings): {error}") from error
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file; give a folder for the checkpoint")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / RECORD).is_file():
        raise InputError(f"{folder} holds other things than a checkpoint and would be replaced; give a new folder")
    fresh, previous = _beside(folder, "writing"), _beside(folder, "previous")
    shutil.rmtree(fresh, ignore_errors=True)
    try:
        fresh.mkdir(parents=True)
        write_state(classifier.module.state_dict(), fresh / WEIGHTS)
        record = sealed({**record, "sha256": file_sha256(fresh / WEIGHTS)})
        (fresh / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        if write_more is not None:
            write_more(fresh)
        for path in (*fresh.iterdir(), fresh):
            _to_disk(path)
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


def settled(folder: Path) -> Path:
    """Where the checkpoint `folder` is: itself, or beside it where a kill came between the two renames of a save."""
    previous = _beside(Path(os.path.realpath(folder)), "previous")  # Path.resolve fails on links that form a loop
    return previous if previous.is_dir() and not folder.exists() else folder


def read_weights(folder: Path) -> State:
    """The tensors of a checkpoint, if the file is the one that was saved; older checkpoints do not say."""
    expected = read_record(folder).get("sha256")
    if expected is not None and expected != file_sha256(folder / WEIGHTS):
        raise InputError(f"{folder / WEIGHTS} is damaged: not the file that was saved; take another checkpoint")
    return read_state(folder / WEIGHTS)


def checkpoint_sha256(folder: Path) -> str:
    """`weights_sha256` of the classifier in a checkpoint folder, which is not built for it."""
    place = settled(Path(folder))
    record = read_record(place)
    mean, std = torch.tensor(record["mean"]), torch.tensor(record["std"])
    beside = {"(mean)": mean, "(std)": std} | ({"(drop tokens)": torch.tensor(True)} if record["drop_tokens"] else {})
    return state_sha256(read_weights(place) | beside)


def read_record(folder: Path) -> dict[str, Any]:
    """The checked contents of `classifier.json`: anybody may have written it."""
    path = folder / RECORD
    for name in (RECORD, WEIGHTS):
        if not (folder / name).is_file():
            raise InputError(f"{folder} is no checkpoint: {name} is missing; give a folder `patchproof train` wrote")
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is damaged ({first_line(error)}); take another checkpoint") from error
    if not isinstance(record, dict) or not _alike(record.get("schema"), 1):
        raise InputError(f"{path} is no description of a classifier: expected a mapping with an integer `schema`")
    if record["schema"] != SCHEMA:
        raise InputError(f"{path} has schema {record['schema']}, this version reads {SCHEMA}; update patchproof")
    filled = {"fill": record.get("mean"), "drop_tokens": False, **record}  # what older checkpoints do not say
    for name, example in _EXAMPLES.items():
        if not _alike(filled.get(name), example) and not (name == "class_names" and filled.get(name, "") is None):
            wrong = f"{name} should look like {example!r}, got {filled.get(name)!r:.60}"
            raise InputError(f"{path} is damaged: {wrong}; take another checkpoint")
    if record["num_classes"] > MOST_CLASSES:
        raise InputError(f"{path} is damaged: more than {MOST_CLASSES:,} classes; take another checkpoint")
    if reserved := set(record["model_args"]) & set(RESERVED_ARGS):
        raise InputError(f"{path} is damaged: {reserved.pop()} among its model_args; take another checkpoint")
    if not is_whole(record):
        raise InputError(
            f"{path} is damaged: not what was saved; take another checkpoint, or remove its `seal` if you changed it"
        )
    return filled


_EXAMPLES: dict[str, Any] = {
    "architecture": "resnet18",
    "source": "file w.pth",
    "mean": [0.5],
    "std": [0.2],
    "fill": [0.5],
    "input_size": [224, 224],
    "num_classes": 10,
    "class_names": ["cat"],
    "interpolation": get_args(Interpolation),
    "crop_pct": 0.9,
    "drop_tokens": (True, False),
    "model_args": {},
    "extra": {},
}


def _alike(value: Any, example: Any) -> bool:
    """Whether a JSON value has the type of the example (integers may stand for floats), or is one of several."""
    if isinstance(example, tuple):
        return value in example
    if isinstance(example, list):
        fits = isinstance(value, list) and len(example) in (1, len(value))
        return fits and all(_alike(each, example[0]) for each in value)
    kind = (int, float) if isinstance(example, float) else type(example)
    return isinstance(value, kind) and not isinstance(value, bool)


def _beside(folder: Path, word: str) -> Path:
    return folder.parent / f".{folder.name}.{word}"


def _to_disk(path: Path) -> None:
    if os.name == "nt":  # Windows flushes only what was opened for writing, and no folder
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
