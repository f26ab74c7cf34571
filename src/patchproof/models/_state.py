"""Weights in files: read without ever running code from them, and put into a network only where every tensor fits."""

from __future__ import annotations

import importlib
import pickle
import traceback
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from patchproof.types import CheckError, InputError

TORCH, OURS = Path(torch.__file__).parent, Path(__file__).parents[1]

SUFFIXES = (".safetensors", ".pth", ".pt", ".bin", ".ckpt")
WRAPPERS = ("state_dict", "model", "model_state_dict")
MOST_CLASSES = 1_000_000
PREFIXES = ("module.", "_orig_mod.")

State = dict[str, Tensor]


def read_state(path: Path) -> State:
    """The tensors of a weight file, by name, on the CPU."""
    if not path.is_file():
        raise InputError(f"no weight file {path}; check the path, or give `random`, a timm tag or a hub id")
    if path.suffix.lower() not in SUFFIXES:
        raise InputError(f"expected a weight file ending in {', '.join(SUFFIXES)}, got {path}")
    try:
        with path.open("rb") as file:
            start = file.read(1)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    if path.suffix.lower() != ".safetensors" and start not in (b"P", b"\x80"):  # of a zip archive, of a pickle
        raise InputError(f"{path} holds no weights: it does not begin as files of torch.save do; give another file")
    try:
        if path.suffix.lower() == ".safetensors":
            return safetensors.torch.load_file(path)
        if zipfile.is_zipfile(path) and any(entry.compress_type for entry in zipfile.ZipFile(path).infolist()):
            raise InputError(f"{path} is compressed, which torch.save never does; save the weights again with it")
        loaded: Any = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise InputError(
            f"{path} was refused: it is damaged or holds more than tensors, and a pickle can run code when loaded; "
            "save only the state dict (torch.save(model.state_dict(), …)) or a .safetensors file"
        ) from error
    except InputError:
        raise
    except Exception as error:  # the readers raise whatever they trip over in a damaged file
        raise InputError(f"{path} is damaged or cut short ({first_line(error)}); copy or save it again") from error
    for key in WRAPPERS:
        if isinstance(loaded, Mapping) and isinstance(loaded.get(key), Mapping):
            loaded = loaded[key]
            break
    if not isinstance(loaded, Mapping) or not loaded or not all(isinstance(t, Tensor) for t in loaded.values()):
        keys = f" with keys {', '.join(map(str, list(loaded)[:4]))}" if isinstance(loaded, Mapping) else ""
        raise InputError(
            f"{path} holds no state dict: expected names and tensors, alone or under {', '.join(WRAPPERS)}, "
            f"got {type(loaded).__name__}{keys}"
        )
    return {str(name): tensor for name, tensor in loaded.items()}


def write_state(state: Mapping[str, Tensor], path: Path) -> None:
    """A .safetensors file of these tensors, on the CPU; a full disk is one clear error."""
    # Cloned: safetensors takes neither tensors that share memory nor other layouts.
    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in state.items()}
    try:
        safetensors.torch.save_file(plain, path)
    except safetensors.SafetensorError as error:
        raise CheckError(f"cannot write {path.name}: {first_line(error)}; what was saved before is kept") from error


def load_state(module: nn.Module, state: Mapping[str, Tensor], *, where: str) -> None:
    """Put `state` into `module`; every tensor must be there, in its shape, and none left over."""
    expected = module.state_dict()
    state = strip_prefixes(state, expected)
    classes, differences = _compare(expected, state)
    if classes is not None:
        raise other_classes(where, *classes)
    if differences:
        raise InputError(f"{where} holds weights of another architecture: {differences}")
    module.load_state_dict(state, strict=False)


def head_classes(module: nn.Module, state: Mapping[str, Tensor]) -> int | None:
    """How many classes `state` has, where that is the one thing in which it differs from `module`; else None."""
    expected = module.state_dict()
    classes = _compare(expected, strip_prefixes(state, expected))[0]
    if classes is not None and classes[0] > MOST_CLASSES:
        raise InputError(f"a last layer of {classes[0]:,} classes is refused; the limit is {MOST_CLASSES:,}")
    return None if classes is None else classes[0]


def other_classes(where: str, found: int, wanted: int | None) -> InputError:
    return InputError(
        f"{where} has {found} classes, but {wanted} are expected: fine-tune it first (`patchproof train`), "
        "or leave num_classes out and match the classes by name"
    )


def strip_prefixes(state: Mapping[str, Tensor], expected: Mapping[str, Any]) -> State:
    """`state` without the `module.` and `_orig_mod.` that wrappers put before every name."""
    names = list(state)
    while prefix := next((p for p in PREFIXES if names and all(name.startswith(p) for name in names)), None):
        if all(name.startswith(prefix) for name in expected):
            break
        names = [name.removeprefix(prefix) for name in names]
    return dict(zip(names, state.values(), strict=True))


def require_finite(module: nn.Module, *, where: str) -> None:
    """No weight is NaN or infinite: such a network gives the same label to everything, or none."""
    for name, tensor in module.state_dict().items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            count = int((~tensor.isfinite()).sum())
            raise CheckError(
                f"{where}: {count} of {tensor.numel()} values in tensor {name} are NaN or infinite; "
                "take an earlier checkpoint"
            )


def first_line(error: BaseException) -> str:
    """What an error of another library says, short enough to stand inside one line of ours."""
    return str(error).strip().split("\n")[0][:160] or type(error).__name__


def failure(error: BaseException) -> str:
    """`KeyError: 'x' (net.py:12, in forward)`: an error in somebody's own code, with its innermost line that is neither
    torch's nor ours."""
    frames = [(Path(frame.filename), frame) for frame in traceback.extract_tb(error.__traceback__)]
    ours = TORCH, OURS, Path(importlib.__file__).parent
    theirs = [frame for path, frame in frames if path.is_file() and not any(map(path.is_relative_to, ours))]
    place = f" ({theirs[-1].filename}:{theirs[-1].lineno}, in {theirs[-1].name})" if theirs else ""
    if isinstance(error, SyntaxError):  # its line has no frame
        place = f" ({error.filename}:{error.lineno})"
    return f"{type(error).__name__}: {first_line(error)}{place}"


def _compare(expected: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> tuple[tuple[int, int] | None, str]:
    """(found, expected) classes where the size of the head alone differs; and all differences in words."""
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
    return heads.pop() if only_head else None, words
