"""What all layers share: types, errors that a user can cause, checks of arguments, short words, and preprocessing."""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import sys
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from torch import Tensor

    Classifier = Callable[[Tensor], Tensor]
else:  # torch takes seconds to import, and the errors below are needed at once
    Classifier = Callable[[Any], Any]
"""[0, 1] images (b c h w) -> logits (b classes). The attribute `fill` (c floats) is the mask colour; default: 0.5."""

Size = tuple[int, int]
"""(height, width)."""

Interpolation = Literal["nearest", "bilinear", "bicubic"]
Precision = Literal["fp32", "tf32", "bf16", "fp16"]
PrecisionChoice = Literal["fp32", "tf32", "bf16", "fp16", "auto"]

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class PatchproofError(Exception):
    """An error that a user can put right, as the message says. The command line shows one line and no traceback."""


class InputError(PatchproofError, ValueError):
    """A wrong value, name, file or combination of them (exit code 2)."""


class CheckError(PatchproofError, RuntimeError):
    """A check on the classifier, the data or a run folder failed (exit code 1)."""


class TauExceededError(CheckError):
    """A fast precision differed from float32 by more than the measured τ: its certificates cannot be trusted."""


def require_one_of(name: str, value: str, allowed: Collection[str]) -> None:
    """Refuse a word that is not one of those allowed."""
    if value not in allowed:
        raise InputError(f"{name} must be one of {', '.join(allowed)}, not {value!r}")


KINDS: Mapping[Any, tuple[Any, str]] = {
    int: (Integral, "a whole number"),
    float: (Real, "a number"),
    str: (str, "text"),
    Path: ((str, os.PathLike), "a path"),
    bool: (bool, "True or False"),
    NoneType: (NoneType, "None"),
}
"""For a type: the types of values that are accepted for it, and its name in messages."""


def require_kinds(annotated: Any, values: Mapping[str, Any], owner: str = "") -> None:
    """Refuse values that the annotations of a function or class rule out; messages put `owner` before their names.

    Checked are plain types and classes, callables, mappings, literals, tuples of fixed length (as any sequence), lists
    of names (Sequence[str]) and unions. A blank path is refused: it would mean the current folder, or a folder that
    nobody sees. Types that a function imports when it is called are looked up in `values`.
    """
    hints = get_type_hints(annotated, localns=dict(values))
    for name, value in values.items():
        hint = hints.get(name, Any)
        if get_origin(hint) is Literal:
            require_one_of(owner + name, value, get_args(hint))
        elif not _fits(value, hint) or (Path in (hint, *get_args(hint)) and is_blank(value)):
            default = getattr(annotated, name, None) if hint is str else None
            example = f", e.g. {default!r}" if isinstance(default, str) else ""
            raise InputError(f"{owner}{name} must be {_words(hint)}{example}, not {' '.join(repr(value).split()):.60}")


def require_seed(seed: int) -> None:
    """Refuse a seed that torch cannot take, or takes as another one."""
    if not 0 <= seed < 2**63:
        raise InputError(f"seed must be in [0, 2^63), not {seed}")


def is_blank(path: Any) -> bool:
    """True for a path that names nothing: without a visible character, or with a NUL character."""
    return isinstance(path, str | Path) and (not str(path).strip() or "\0" in str(path))


def typed(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Decorate a function so that `require_kinds` checks its arguments at every call."""

    @wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        try:
            given = inspect.signature(function).bind(*args, **kwargs).arguments
        except TypeError:  # the call below raises a better one
            given = {}
        require_kinds(function, given)
        return function(*args, **kwargs)

    return call


def _fits(value: Any, hint: Any) -> bool:
    """True if the value may stand for the type; True for types that are not checked."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, part) for part in parts)
    if origin is tuple and Ellipsis not in parts:
        try:
            items = list(value) if hasattr(value, "__getitem__") else []
        except TypeError:  # a tensor of one number has no items
            items = []
        return len(items) == len(parts) and all(map(_fits, items, parts))
    if hint == Sequence[str]:  # text is a sequence of letters, and a set has no order
        listed = isinstance(value, Collection) and not isinstance(value, str | set | frozenset)
        return listed and all(isinstance(name, str) for name in value)
    if origin is Literal:
        return value in parts
    if origin in (Callable, Mapping):
        return isinstance(value, origin)
    if origin is not None or hint is Any or not isinstance(hint, type):
        return True
    if getattr(hint, "_is_protocol", False) and isinstance(value, type):  # a class has the members of its instances
        return False
    return isinstance(value, KINDS.get(hint, (hint,))[0]) and (hint is bool or not isinstance(value, bool))


def _words(hint: Any) -> str:
    """The type in the words of messages."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Literal:
        return " or ".join(f"`{word}`" for word in parts)
    if origin is tuple:
        return "(height, width) in whole numbers" if hint == Size else f"({', '.join(map(_words, parts))})"
    if hint == Sequence[str]:
        return "a list of names"
    if origin in (Callable, Mapping):
        return "a function" if origin is Callable else "a mapping"
    if parts:
        return " or ".join(map(_words, parts))
    if hint in KINDS:
        return KINDS[hint][1]
    package = hint.__module__.partition(".")[0]
    if package == "patchproof":
        package = "pp" if hasattr(sys.modules[package], hint.__name__) else hint.__module__
    article = "an" if package[0] in "aeiou" else "a"
    return f"{article} {package}.{hint.__name__}"


def first_line(error: BaseException) -> str:
    """The message of another library's error, short enough to be quoted in a line of ours."""
    return str(error).strip().split("\n")[0][:160] or type(error).__name__


def failure(error: BaseException) -> str:
    """Describe an error in the user's code as `KeyError: 'x' (net.py:12, in forward)`.

    The place is the innermost line that is neither torch's, Python's import machinery's nor ours.
    """
    import torch

    place = ""
    libraries = Path(torch.__file__).parent, Path(importlib.__file__).parent, Path(__file__).parent
    for frame in traceback.extract_tb(error.__traceback__):
        path = Path(frame.filename)
        if path.is_file() and not any(map(path.is_relative_to, libraries)):
            place = f" ({frame.filename}:{frame.lineno}, in {frame.name})"
    if isinstance(error, SyntaxError):  # its line has no frame
        place = f" ({error.filename}:{error.lineno})"
    return f"{type(error).__name__}: {first_line(error)}{place}"


NOTED: set[str] = set()


def note(words: str, *, example: str = "") -> None:
    """Log something that a user should know, once per process, with the first example of it."""
    if words not in NOTED:
        NOTED.add(words)
        logging.getLogger("patchproof").warning(f"{words}, e.g. {visible(example)}" if example else words)


def kind_of(value: Any) -> str:
    """The kind of a value in messages: `torch.uint8 of (2, 3, 8, 8)`, `ndarray, float32 of (8, 8)`, or `list`."""
    if not hasattr(value, "dtype"):
        return type(value).__name__
    owner = "" if str(value.dtype).startswith("torch.") else f"{type(value).__name__}, "
    return f"{owner}{value.dtype} of {tuple(value.shape)}"


def visible(text: str) -> str:
    """`text` on one line, with unprintable characters as escapes such as \\x1b or \\udcff."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def printable(text: str) -> str:
    """The text on one line of at most 200 characters that can be shown."""
    return shortened(visible(text), 200)


def shortened(text: str, longest: int) -> str:
    return text if len(text) <= longest else text[: longest - 1] + "…"


def shortened_name(name: str, longest: int) -> str:
    """Shorten a name in the middle, because names of runs mostly differ at the end."""
    head = longest // 3
    return name if len(name) <= longest else f"{name[:head]}…{name[head + 1 - longest :]}"


def count_words(count: int, singular: str, plural: str) -> str:
    return f"{count:,} {singular if count == 1 else plural}"


@dataclass(frozen=True)
class Preprocessing:
    """How an image of any size becomes the network input: resize, then crop the centre.

    `resize` is the length of the shorter side (aspect kept, longer side rounded down) or an exact (height, width). With
    `cover`, the image keeps its aspect and becomes just large enough to cover that (height, width). `crop` is the
    (height, width) cut from the centre; None keeps everything. `antialias` widens the kernel when shrinking, as
    Pillow does; without it, bilinear and bicubic read 2 and 4 native pixels per axis at any scale.
    """

    resize: int | Size | None
    crop: Size | None = None
    interpolation: Interpolation = "bicubic"
    antialias: bool = True
    cover: bool = False

    def __post_init__(self) -> None:
        require_kinds(Preprocessing, vars(self))
        for name in ("resize", "crop"):
            value: Any = getattr(self, name)
            if value is not None:
                value = int(value) if isinstance(value, Integral) else tuple(map(int, value))
                if min(value if isinstance(value, tuple) else (value,)) < 1:
                    raise InputError(f"{name} must be at least one pixel, not {value}")
                object.__setattr__(self, name, value)
        if self.cover and not isinstance(self.resize, tuple):
            raise InputError(f"an image can cover a (height, width), not {self.resize}")
