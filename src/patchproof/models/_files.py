"""Weight files and checkpoints: no code in them is ever run, and weights enter a network only if every tensor fits.

A checkpoint is a folder with `model.safetensors` and `classifier.json`. It is intact or absent, even after a kill.
JSON files carry a checksum of themselves (`sealed`).
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from patchproof.models._classifier import ImageClassifier, settings, state_sha256
from patchproof.models._networks import is_own
from patchproof.types import CheckError, InputError, Interpolation, first_line

SUFFIXES = (".safetensors", ".pth", ".pt", ".bin", ".ckpt")
WRAPPERS = ("state_dict", "model", "model_state_dict")
PREFIXES = ("module.", "_orig_mod.")
MOST_CLASSES = 1_000_000
"""Largest number of classes that a file may ask for: a last layer of a billion would fill the memory."""

SCHEMA = 1
WEIGHTS, RECORD = "model.safetensors", "classifier.json"
SEAL = "seal"
RESERVED_ARGS = ("pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir")
"""Arguments of timm.create_model that say where weights are read from. They are never taken from a file."""

State = dict[str, Tensor]


def read_state(path: Path) -> State:
    """Read the tensors of a weight file, by name, onto the CPU."""
    if not path.is_file():
        raise InputError(f"no weight file {path}; check the path, or give `random`, a timm tag or a hub id")
    if path.suffix.lower() not in SUFFIXES:
        raise InputError(f"expected a weight file ending in {', '.join(SUFFIXES)}, got {path}")
    try:
        if path.suffix.lower() == ".safetensors":
            return safetensors.torch.load_file(path)
        with path.open("rb") as file:
            head = file.read(20)
        if not head.startswith((b"PK", b"\x80")):  # a zip, or in old files a pickle
            raise InputError(
                f"{path} is no file of torch.save, it begins with {str(head)[1:]}: perhaps a web page or a Git LFS "
                "pointer in place of the weights; download them again"
            )
        if zipfile.is_zipfile(path) and any(entry.compress_type for entry in zipfile.ZipFile(path).infolist()):
            raise InputError(f"{path} is compressed, which torch.save never does; save the weights again with it")
        loaded: Any = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise InputError(
            f"{path} was refused: it is damaged or holds other things than tensors, and a pickle can run code when "
            "loaded; save only the state dict (torch.save(model.state_dict(), …)) or a .safetensors file"
        ) from error
    except InputError:
        raise
    except PermissionError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    except Exception as error:  # the readers raise many kinds of errors for a damaged file
        raise InputError(f"{path} is damaged or cut short ({first_line(error)}); copy or save it again") from error
    if isinstance(loaded, Mapping):
        loaded = next((loaded[key] for key in WRAPPERS if isinstance(loaded.get(key), Mapping)), loaded)
    if not isinstance(loaded, Mapping) or not loaded or not all(isinstance(t, Tensor) for t in loaded.values()):
        keys = f" with keys {', '.join(map(str, list(loaded)[:4]))}" if isinstance(loaded, Mapping) else ""
        raise InputError(
            f"{path} holds no state dict: expected names and tensors, alone or under {', '.join(WRAPPERS)}, "
            f"got {type(loaded).__name__}{keys}"
        )
    return {str(name): tensor for name, tensor in loaded.items()}


def write_state(state: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors into a .safetensors file; a full disk raises one clear error."""
    # Cloned, because safetensors takes neither tensors that share memory nor other layouts.
    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in state.items()}
    try:
        safetensors.torch.save_file(plain, path)
    except safetensors.SafetensorError as error:
        raise CheckError(f"cannot write {path.name}: {first_line(error)}; what was saved before is kept") from error


def load_state(module: nn.Module, state: Mapping[str, Tensor], *, where: str) -> None:
    """Put `state` into `module`. Every tensor must be there in its shape, and none may be left over."""
    state, classes, differences = matched(module, state)
    if classes is not None:
        require_head(where, *classes)
    if differences:
        raise InputError(f"{where} holds weights of another architecture: {differences}")
    module.load_state_dict(state, strict=False)


def matched(module: nn.Module, state: Mapping[str, Tensor]) -> tuple[State, tuple[int, int] | None, str]:
    """Compare `state` with the tensors of `module`.

    Return `state` without prefixes that wrappers put before all names, (found, expected) classes if only the size of
    the head differs, and all differences in words.
    """
    expected, names = module.state_dict(), list(state)
    for prefix in PREFIXES * 2:  # each may be inside the other
        if names and all(name.startswith(prefix) for name in names):
            if all(name.startswith(prefix) for name in expected):
                break
            names = [name.removeprefix(prefix) for name in names]
    state = dict(zip(names, state.values(), strict=True))
    # Old files lack num_batches_tracked; it plays no part in a forward pass.
    missing = [name for name in expected if name not in state and not name.endswith("num_batches_tracked")]
    unexpected = [name for name in state if name not in expected]
    both = {name: (tensor, expected[name]) for name, tensor in state.items() if name in expected}
    shapes = {n: (tuple(found.shape), tuple(own.shape)) for n, (found, own) in both.items() if found.shape != own.shape}
    dtypes = {n: found.dtype for n, (found, own) in both.items() if own.is_floating_point() > found.is_floating_point()}
    kinds = {
        "missing": missing,
        "unexpected": unexpected,
        "of another shape": [f"{name}: {found} for {own}" for name, (found, own) in shapes.items()],
        "of another type": [f"{name}: {dtype}" for name, dtype in dtypes.items()],
    }
    words = ", ".join(f"{len(found)} tensors {kind} (e.g. {found[0]})" for kind, found in kinds.items() if found)
    heads = {(found[0], own[0]) if found and own and found[1:] == own[1:] else None for found, own in shapes.values()}
    only_head = not (missing or unexpected or dtypes) and len(heads) == 1 and len(shapes) <= 4
    return state, heads.pop() if only_head else None, words


def require_head(where: str, found: int, wanted: int | None) -> None:
    """Refuse a network without a head, or with another number of classes than `wanted`."""
    if found < 1:
        raise InputError(f"{where} has no classification head (it gives features); choose weights that have one")
    if wanted not in (None, found):
        raise InputError(
            f"{where} has {found} classes, but {wanted} are expected: fine-tune it first (`patchproof train`), "
            "or leave num_classes out and match the classes by name"
        )


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content with its SHA-256 under the last key."""
    plain = {key: value for key, value in content.items() if key != SEAL}
    return {**content, SEAL: hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()}


def is_whole(content: Mapping[str, Any]) -> bool:
    """True if the content matches its checksum, or has none."""
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
    """Write the classifier into `folder`, replacing a checkpoint that is there.

    The folder is written next to its place and renamed, so a failure or kill at any moment leaves the old checkpoint or
    the new one, and `settled` finds it. `write_more(path)` may add files before that.
    """
    folder = Path(folder).resolve()
    record: dict[str, Any] = {"schema": SCHEMA, **settings(classifier), "extra": dict(extra or {})}
    try:
        record = json.loads(json.dumps(record, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise InputError(f"extra must be plain JSON (text, finite numbers, lists, mappings): {error}") from error
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir()) and not (folder / RECORD).is_file()):
        raise InputError(f"{folder} is no checkpoint and would be replaced; give a new folder")
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
        fresh.rename(folder)
        _to_disk(folder.parent)
        shutil.rmtree(previous, ignore_errors=True)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def checkpoint_architecture(folder: Path) -> str | None:
    """The architecture of the checkpoint in `folder`; None if the folder holds no checkpoint.

    A factory is refused: building one runs code, which only the user may name, not a folder of unknown origin.
    """
    place = settled(Path(folder).expanduser())
    if not (place / RECORD).is_file():
        return None
    name = str(read_record(place)["architecture"])
    if is_own(name):
        raise InputError(
            f"{folder} holds weights for the factory {name}; give model={name} to have its code run "
            "(pp.load_classifier)"
        )
    return name


def settled(folder: Path) -> Path:
    """Where the checkpoint `folder` is: in a folder next to it if a kill came between the two renames of a save."""
    previous = _beside(Path(os.path.realpath(folder)), "previous")  # Path.resolve fails on links that form a loop
    return previous if previous.is_dir() and not folder.exists() else folder


def checkpoint_sha256(folder: Path) -> str:
    """`weights_sha256` of the classifier in a checkpoint folder, without building it."""
    place = settled(Path(folder))
    record = read_record(place)
    mean, std = torch.tensor(record["mean"]), torch.tensor(record["std"])
    return state_sha256(read_weights(place, record), mean, std, drop_tokens=record["drop_tokens"])


def read_weights(folder: Path, record: Mapping[str, Any]) -> State:
    """Read the tensors of a checkpoint if the file is the one that was saved, as far as the record says."""
    if "sha256" in record and record["sha256"] != file_sha256(folder / WEIGHTS):
        raise InputError(f"{folder / WEIGHTS} is damaged: not the file that was saved; take another checkpoint")
    return read_state(folder / WEIGHTS)


def read_record(folder: Path) -> dict[str, Any]:
    """Read and check `classifier.json`, which anybody may have written."""
    path = folder / RECORD

    def damaged(problem: str, hint: str = "") -> InputError:
        return InputError(f"{path} is damaged: {problem}; take another checkpoint{hint}")

    for name in (RECORD, WEIGHTS):
        if not (folder / name).is_file():
            last = folder / "checkpoint-last"
            hint = f"did you mean {last}?" if last.is_dir() else "give a checkpoint that `patchproof train` wrote"
            raise InputError(f"{folder} is no checkpoint: {name} is missing; {hint}")
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise damaged(first_line(error)) from error
    schema = record.get("schema") if isinstance(record, dict) else None
    if schema != SCHEMA:
        raise InputError(f"{path} has schema {schema!r:.60}, this version reads {SCHEMA}; update patchproof")
    for name, example in _EXAMPLES.items():
        value = record.get(name)
        if not _alike(value, example) and not (name == "class_names" and value is None):
            raise damaged(f"{name} should look like {example!r}, got {value!r:.60}")
    if record["num_classes"] > MOST_CLASSES:
        raise damaged(f"more than {MOST_CLASSES:,} classes")
    reserved = set(record["model_args"]) & set(RESERVED_ARGS)
    if reserved:
        raise damaged(f"{reserved.pop()} among its model_args")
    if not is_whole(record):
        raise damaged("not what was saved", ", or remove its `seal` if you changed it")
    return {"class_names": None, **record}


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
    """True if a JSON value has the type of the example (an integer may stand for a float), or is one of a tuple."""
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
    if os.name == "nt":  # Windows flushes only files that were opened for writing, and no folder
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
