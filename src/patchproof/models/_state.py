"""Weights in files: read without ever running code from them, and put into a network only where every tensor fits."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from patchproof.types import CheckError, InputError

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
    if path.suffix.lower() == ".safetensors":
        return _read_safetensors(path)
    return _plain_state(_read_torch(path), path)


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
    misfit = _compare(expected, state)
    if misfit.classes is not None:
        raise InputError(_classes_message(where, *misfit.classes))
    if misfit.missing or misfit.unexpected or misfit.reshaped or misfit.retyped:
        raise InputError(f"{where} holds weights of another architecture: {misfit.describe()}")
    module.load_state_dict(state, strict=False)


def head_classes(module: nn.Module, state: Mapping[str, Tensor]) -> int | None:
    """How many classes `state` has, where that is the one thing in which it differs from `module`; else None."""
    expected = module.state_dict()
    classes = _compare(expected, strip_prefixes(state, expected)).classes
    if classes is not None and classes[0] > MOST_CLASSES:
        raise InputError(f"a last layer of {classes[0]:,} classes is refused; the limit is {MOST_CLASSES:,}")
    return None if classes is None else classes[0]


def strip_prefixes(state: Mapping[str, Tensor], expected: Mapping[str, Any]) -> State:
    """`state` without the `module.` and `_orig_mod.` that wrappers put before every name."""
    names = list(state)
    while (prefix := _common_prefix(names)) and not all(name.startswith(prefix) for name in expected):
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


@dataclass(frozen=True)
class _Misfit:
    """Where a state dict and a network disagree; `classes` = (found, expected) when only the head's size differs."""

    missing: list[str]
    unexpected: list[str]
    reshaped: list[str]
    retyped: list[str]
    classes: tuple[int, int] | None

    def describe(self) -> str:
        """Counts and one example of each kind."""
        kinds = (
            ("missing", self.missing),
            ("unexpected", self.unexpected),
            ("of another shape", self.reshaped),
            ("of another type", self.retyped),
        )
        return ", ".join(f"{len(found)} tensors {kind} (e.g. {found[0]})" for kind, found in kinds if found)


def _compare(expected: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> _Misfit:
    # Old files lack num_batches_tracked; it plays no part in a forward pass.
    missing = [name for name in expected if name not in state and not name.endswith("num_batches_tracked")]
    unexpected = [name for name in state if name not in expected]
    shapes = {
        name: (tuple(state[name].shape), tuple(expected[name].shape))
        for name in expected
        if name in state and state[name].shape != expected[name].shape
    }
    reshaped = [f"{name}: {found} for {wanted}" for name, (found, wanted) in shapes.items()]
    retyped = [f"{name}: {state[name].dtype}" for name in expected if _not_a_weight(expected[name], state.get(name))]
    classes = None if missing or unexpected or retyped else _head_sizes(list(shapes.values()))
    return _Misfit(missing, unexpected, reshaped, retyped, classes)


def _not_a_weight(expected: Tensor, found: Tensor | None) -> bool:
    """Whole, boolean or complex numbers where a network computes with real ones."""
    return found is not None and expected.is_floating_point() and not found.is_floating_point()


def _head_sizes(shapes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> tuple[int, int] | None:
    """(found, expected) classes when all the shapes differ in the first axis alone and all in the same way."""
    if not shapes or any(not found or found[1:] != wanted[1:] for found, wanted in shapes):
        return None
    sizes = {(found[0], wanted[0]) for found, wanted in shapes}
    return sizes.pop() if len(sizes) == 1 and len(shapes) <= 4 else None


def _classes_message(where: str, found: int, expected: int) -> str:
    return (
        f"{where} has {found} classes, but {expected} are expected: fine-tune it on data of {expected} classes first "
        f"(`patchproof train`), or use it with the {found} classes it was trained on"
    )


def _read_safetensors(path: Path) -> State:
    try:
        return safetensors.torch.load_file(path)
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise InputError(f"{path} is damaged or cut short ({first_line(error)}); copy or save it again") from error


def _read_torch(path: Path) -> Any:
    try:
        if zipfile.is_zipfile(path) and any(entry.compress_type for entry in zipfile.ZipFile(path).infolist()):
            raise InputError(f"{path} is compressed, which torch.save never does; save the weights again with it")
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise InputError(
            f"{path} was refused: it is damaged or holds more than tensors, and a pickle can run code when loaded; "
            "save only the state dict (torch.save(model.state_dict(), …)) or a .safetensors file"
        ) from error
    except InputError:
        raise
    except Exception as error:  # torch's reader raises whatever it trips over in a damaged file
        raise InputError(f"{path} is damaged or cut short ({first_line(error)}); copy or save it again") from error


def _plain_state(loaded: Any, path: Path) -> State:
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


def _common_prefix(names: list[str]) -> str | None:
    return next((prefix for prefix in PREFIXES if names and all(name.startswith(prefix) for name in names)), None)
